//! The ring's file: where it lies, its header, its owner's memory and its readers' view.
//!
//! `directory` gives the file its path, lock and end, `space` its space, and `moving` another path; `header` writes its head; `map` is the
//! memory of the owner, which `truncation` keeps alive when others truncate the file; `view` reads it.

pub(crate) mod directory;
pub(crate) mod header;
pub(crate) mod map;
pub(crate) mod moving;
pub(crate) mod space;
mod truncation;
pub(crate) mod view;
