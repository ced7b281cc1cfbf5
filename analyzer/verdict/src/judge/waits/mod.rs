//! Which rank waits for which: the graph of waits ([`wait_graph`]), its components and roots ([`wait_root`]), and where
//! a rank is missed first ([`missed`]).
//!
//! `from_any` decides who may send what a receive from any source takes, and `one_sided` enters accesses to windows.
//! [`delivered`] and `stopped` leave out waits that the records do not prove, and [`busy`] corrects the roots for ranks
//! of which one thread continues.

pub(crate) mod busy;
mod components;
pub(super) mod delivered;
mod from_any;
pub(crate) mod missed;
mod one_sided;
mod stopped;
pub(crate) mod wait_graph;
pub(crate) mod wait_root;
