//! The ring's file: where it lies, its header, its owner's memory and its readers' view.
//!
//! `names` are the names of rings and of jobs' directories. `directory` gives the file its path and lock, and removes
//! it; `space` reserves its space, and `moving` gives it another path. `header` writes its header. `map` is the memory
//! of the owner, which `truncation` keeps usable when others truncate the file. `view` reads the file.

pub(crate) mod directory;
pub(crate) mod header;
pub(crate) mod map;
pub(crate) mod moving;
pub(crate) mod names;
pub(crate) mod space;
mod truncation;
pub(crate) mod view;
