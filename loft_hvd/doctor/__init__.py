"""What is installed here, what is missing, and whether ranks can talk: ``loft-hvd doctor``."""
