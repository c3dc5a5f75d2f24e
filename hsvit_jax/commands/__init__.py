"""What each mode of the command line does: a module for each, with `run(request)`."""
