//! Each example is a program in the directory above.
