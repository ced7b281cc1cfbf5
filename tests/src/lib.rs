//! Worlds of ranks, faults by name, and stable output, for the tests beside.
