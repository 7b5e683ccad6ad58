"""What people see of a run: live lines, charts, summaries, pages of notebooks."""
