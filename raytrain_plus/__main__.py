"""`python -m raytrain_plus` is `raytrain`."""

from raytrain_plus.cli import main

main()
