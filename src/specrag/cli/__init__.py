"""The ``specrag`` command: one small file per command, put together in ``main``."""
