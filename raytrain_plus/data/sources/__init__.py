"""Where rows come from: indexes of files, of datasets that functions return, of several of them."""
