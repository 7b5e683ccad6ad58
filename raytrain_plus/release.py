"""Which release of the package this is; also where only its files were sent, and nothing was installed."""

VERSION = "0.1.0"
