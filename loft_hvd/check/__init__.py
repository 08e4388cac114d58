"""What a script forgot on its way to Horovod and loft_hvd: run for a minute, watched."""
