"""The first minutes: what `raytrain init` and `raytrain new-job` write. `templates` holds tasks, jobs and tests."""
