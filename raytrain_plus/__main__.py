"""`python -m raytrain_plus` is `raytrain`."""

from raytrain_plus.cli.main import main

main()
