"""Other projects' interfaces to artifacts, one module each; importing a module registers what it offers."""
