"""Programs that run in the Python of another framework. They import nothing from fsdptrain."""
