"""The modes of the command line: a module for each, with `run(request)`."""
