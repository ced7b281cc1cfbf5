//! The views in six situations and several sizes, as text; colors where they matter.

#[path = "../common/mod.rs"]
mod common;
mod findings;
mod groups;
mod jobs;
mod overview;
mod ranks;
mod situations;
mod sizes;
mod timeline;
mod why;

/// The views of the recorded jobs of 32 ranks, and some states of them, with the keys that lead there from the first
/// screen.
const VIEWS: &[(&str, &str)] = &[
    ("overview", ""),
    ("groups", "2"),
    ("groups unfolded", "2o"),
    ("group", "2<enter>"),
    ("ranks", "3"),
    ("ranks by lag", "3c"),
    ("in flight", "4"),
    ("stragglers", "5"),
    ("warnings", "6"),
    ("finding", "6<enter>"),
    ("timeline", "7"),
    ("sources", "8"),
    ("jobs", "9"),
    ("rank", ":rank 21<enter>"),
    ("why", "w"),
    ("stacks", "t"),
    ("compare", ":mark 5<enter>:mark 21<enter>M"),
    ("help", "?"),
    ("filter being typed", "/rank:0-7 op:"),
    ("problems only", "2z"),
    ("paused", " "),
];
