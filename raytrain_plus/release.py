"""State the version of the package, also if only its files were copied and nothing was installed."""

VERSION = "0.1.0"
