"""How ops run: one folder per backend, files named after the ops. `registry` is the table."""
