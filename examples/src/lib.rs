//! An empty library, which Cargo requires of the package; the examples are the programs in `examples/`.
