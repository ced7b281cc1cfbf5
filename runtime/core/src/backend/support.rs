//! Functions and types of the core that backends use besides its traits.

pub use crate::op::buffer::element_size;
pub use crate::store::addresses_of;
