//! Each example is one program in the directory above.
