"""Who is off: evidence against workers, quarantine, and how far ranks lie apart."""
