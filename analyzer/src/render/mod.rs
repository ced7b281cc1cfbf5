//! Output: reports as text, JSON and HTML, and records in the formats of other tools.

pub mod export;
pub mod print;
