"""The verbs of the ``lrmoe`` command that plan and compare on paper, one module each: ``add_options`` and ``run``."""
