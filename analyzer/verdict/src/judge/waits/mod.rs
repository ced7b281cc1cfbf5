//! Which rank waits for which: the graph of waits ([`wait_graph`]), its components and roots ([`wait_root`]), and where
//! a rank is missed first ([`missed`]).

pub(crate) mod busy;
mod components;
pub(super) mod delivered;
mod from_any;
pub(crate) mod missed;
mod one_sided;
mod stopped;
pub(crate) mod wait_graph;
pub(crate) mod wait_root;
