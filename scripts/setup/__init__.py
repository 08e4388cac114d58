"""Set-up of a working copy: a virtual environment, pinned packages, Horovod and the extension.

Standard library only, because it runs before anything is installed. Read top to bottom: runner and
state are the tools; machine, environment, cuda, horovod and extension are the steps; ``__main__``
puts them in order.
"""
