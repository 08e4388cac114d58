"""The optimizer a script steps: reduced gradients, exact weights, watched workers."""
