//! Printers of a [`Report`](rcomm_verdict::Report): text for a terminal, JSON for programs, HTML for a browser.
//!
//! Printers only format their arguments. They write to any [`std::io::Write`], so tests print into memory.

pub mod html;
pub mod human;
pub mod json;
