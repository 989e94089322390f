"""Where weights come from and gradients go, one module a way; :mod:`~lrmoe.parallel.stores.weight_store`
says what each does."""
