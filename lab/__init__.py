"""Code that users do not run: takes evidence on a GPU. In no wheel."""
