//! Each example is one program beside this file.
