"""The conformance set: numbers by rule, and digests of the bytes that every format makes of them.

docs/conformance.md specifies both, so that a library can be checked that does not know te_mx."""
