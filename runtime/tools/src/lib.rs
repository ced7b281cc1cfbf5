//! What `rcomm-run` and `rcomm-bench` share.
