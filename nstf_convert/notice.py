"""The level of lines that are shown without --verbose, and not with --quiet: between logging's INFO and WARNING."""

NOTICE = 25
