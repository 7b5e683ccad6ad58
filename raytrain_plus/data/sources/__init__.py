"""Where rows come from: `Source`, and its kinds."""
