"""The suites that ship with specrag, one a module; each module has ``suite() -> Suite``."""
