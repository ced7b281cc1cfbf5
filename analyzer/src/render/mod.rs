//! Output: reports for people, programs and browsers, and records in the formats of other tools.

pub mod export;
pub mod print;
