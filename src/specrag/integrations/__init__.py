"""Other libraries, run with specrag's methods."""
