//! What the backends of a world are configured with, and what they look up besides operations.

pub(crate) mod nan;
pub(crate) mod options;
pub(crate) mod ras;
