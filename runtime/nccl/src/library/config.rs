//! The configuration of a communicator, and its form in C.

use super::sys;
use rcomm_core::{Error, ErrorKind, Result};
use std::ffi::{CString, c_int};

/// Whether calls of the library wait for peers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Blocking {
    /// Calls do not wait; the communicator is polled until they are done. From NCCL 2.23 on, the library starts a
    /// thread for each call, which costs more than the call's own work.
    No,
    /// Calls wait, as in PyTorch. A call that may have to connect to peers (making a communicator, and the
    /// first operation of each type, power of two of bytes, and peer) runs on a separate thread and has a deadline.
    #[default]
    Yes,
}

/// Options of one communicator; `None` leaves the choice to the library.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CommOptions {
    /// Whether calls wait for peers.
    pub blocking: Blocking,
    /// Minimum number of thread blocks per kernel.
    pub min_ctas: Option<i32>,
    /// Maximum number of thread blocks per kernel.
    pub max_ctas: Option<i32>,
    /// Thread block cluster size.
    pub cga_cluster_size: Option<i32>,
    /// Traffic class of the network (2.26).
    pub traffic_class: Option<i32>,
    /// Network module (`Socket`, `IB`, ...).
    pub net_name: Option<String>,
    /// Whether a communicator that is split off shares its parent's resources (2.18).
    pub split_share: Option<bool>,
    /// Whether a shrunk communicator shares its parent's resources (2.27).
    pub shrink_share: Option<bool>,
    /// Whether the network may reduce (2.27).
    pub collnet: Option<bool>,
    /// `NCCL_CTA_POLICY_*`: 0 = default, 1 = efficiency (2.27), 2 = zero (2.28).
    pub cta_policy: Option<i32>,
    /// Thread blocks for NVLink SHARP (2.27).
    pub nvls_ctas: Option<i32>,
    /// Channels per network peer (2.28).
    pub channels_per_net_peer: Option<i32>,
    /// Whether scheduling is centered on NVLink (2.28).
    pub nvlink_centric: Option<bool>,
    /// `graphUsageMode`: 0 = no CUDA graphs, 1 = one graph, 2 = several graphs, or graphs mixed with other calls
    /// (2.29).
    pub graph_usage_mode: Option<i32>,
    /// Contexts for one-sided operations; 0 = none (2.29).
    pub rma_contexts: Option<i32>,
    /// Maximum number of peers with which a rank exchanges messages at once, also those of all-to-all, gather and
    /// scatter (2.30).
    pub max_p2p_peers: Option<i32>,
    /// `graphStreamOrdering`: 1 = NCCL orders the kernels that are captured into CUDA graphs, 0 = the program does
    /// (2.30.7).
    pub graph_stream_ordering: Option<i32>,
    /// Whether the device starts the launches of several communicators in their order on the host (2.32; from 2.26 on,
    /// the variable `NCCL_LAUNCH_ORDER_IMPLICIT` sets this for all communicators).
    pub launch_order_implicit: Option<bool>,
    /// Signals for one-sided operations (2.32).
    pub rma_signals: Option<i32>,
    /// Whether one-sided operations connect when the communicator is made (2.32).
    pub rma_eager: Option<bool>,
    /// `hostCftMode` (2.32).
    pub host_cft_mode: Option<i32>,
    /// `nvlsHostMode` (2.32).
    pub nvls_host_mode: Option<i32>,
}

/// The C form of the options, with the strings that it points to.
pub(crate) struct RawConfig {
    config: sys::Config,
    _strings: [Option<CString>; 2],
}

// SAFETY: the pointers refer to strings of `_strings` or to names that are never freed. The bytes of these strings
// do not move with the value, and nothing writes to them.
unsafe impl Send for RawConfig {}

impl AsMut<sys::Config> for RawConfig {
    fn as_mut(&mut self) -> &mut sys::Config {
        &mut self.config
    }
}

impl CommOptions {
    /// Returns the C form of the options. `name` is the communicator's name in the library's logs and tools (2.27).
    ///
    /// # Errors
    /// `InvalidArgument` if a string holds a NUL byte.
    pub(crate) fn to_raw(&self, name: &str) -> Result<RawConfig> {
        let text = |option: &str, value: Option<&str>| {
            let value = value.map(CString::new).transpose();
            value.map_err(|_| {
                Error::new(
                    ErrorKind::InvalidArgument,
                    format!("the communicator's {option} holds a NUL byte"),
                )
            })
        };
        let name = text("name", Some(name))?;
        let net = text("network module", self.net_name.as_deref())?;
        let mut config = sys::Config::new();
        config.blocking = c_int::from(self.blocking == Blocking::Yes);
        let pointer = |string: &Option<CString>| {
            let string = string.as_ref();
            string.map_or(std::ptr::null(), |string| string.as_ptr())
        };
        config.comm_name = pointer(&name);
        config.net_name = pointer(&net);
        let set = |field: &mut c_int, value: Option<i32>| {
            if let Some(value) = value {
                *field = value;
            }
        };
        set(&mut config.min_ctas, self.min_ctas);
        set(&mut config.max_ctas, self.max_ctas);
        set(&mut config.cga_cluster_size, self.cga_cluster_size);
        set(&mut config.traffic_class, self.traffic_class);
        set(&mut config.split_share, self.split_share.map(i32::from));
        set(&mut config.shrink_share, self.shrink_share.map(i32::from));
        set(&mut config.collnet_enable, self.collnet.map(i32::from));
        set(&mut config.cta_policy, self.cta_policy);
        set(&mut config.nvls_ctas, self.nvls_ctas);
        set(
            &mut config.n_channels_per_net_peer,
            self.channels_per_net_peer,
        );
        let nvlink_centric = self.nvlink_centric.map(i32::from);
        set(&mut config.nvlink_centric_sched, nvlink_centric);
        set(&mut config.graph_usage_mode, self.graph_usage_mode);
        set(&mut config.num_rma_ctx, self.rma_contexts);
        set(&mut config.max_p2p_peers, self.max_p2p_peers);
        set(
            &mut config.graph_stream_ordering,
            self.graph_stream_ordering,
        );
        let launch_order = self.launch_order_implicit.map(i32::from);
        set(&mut config.launch_order_implicit, launch_order);
        set(&mut config.num_rma_sig, self.rma_signals);
        set(&mut config.rma_eager_init, self.rma_eager.map(i32::from));
        set(&mut config.host_cft_mode, self.host_cft_mode);
        set(&mut config.nvls_host_mode, self.nvls_host_mode);
        Ok(RawConfig {
            config,
            _strings: [name, net],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CStr;

    #[test]
    fn every_option_sets_its_field_and_the_rest_keep_the_defaults() {
        let options = CommOptions {
            blocking: Blocking::No,
            min_ctas: Some(1),
            max_ctas: Some(2),
            cga_cluster_size: Some(3),
            traffic_class: Some(4),
            net_name: Some("Socket".to_owned()),
            split_share: Some(true),
            shrink_share: Some(false),
            collnet: Some(true),
            cta_policy: Some(5),
            nvls_ctas: Some(6),
            channels_per_net_peer: Some(7),
            nvlink_centric: Some(true),
            graph_usage_mode: Some(8),
            rma_contexts: Some(9),
            max_p2p_peers: Some(10),
            graph_stream_ordering: Some(11),
            launch_order_implicit: Some(true),
            rma_signals: Some(12),
            rma_eager: Some(true),
            host_cft_mode: Some(13),
            nvls_host_mode: Some(14),
        };
        let mut raw = options.to_raw("dp").unwrap();
        let set: &sys::Config = raw.as_mut();
        let numbers = [
            (set.blocking, 0),
            (set.min_ctas, 1),
            (set.max_ctas, 2),
            (set.cga_cluster_size, 3),
            (set.traffic_class, 4),
            (set.split_share, 1),
            (set.shrink_share, 0),
            (set.collnet_enable, 1),
            (set.cta_policy, 5),
            (set.nvls_ctas, 6),
            (set.n_channels_per_net_peer, 7),
            (set.nvlink_centric_sched, 1),
            (set.graph_usage_mode, 8),
            (set.num_rma_ctx, 9),
            (set.max_p2p_peers, 10),
            (set.graph_stream_ordering, 11),
            (set.launch_order_implicit, 1),
            (set.num_rma_sig, 12),
            (set.rma_eager_init, 1),
            (set.host_cft_mode, 13),
            (set.nvls_host_mode, 14),
        ];
        for (nth, (field, expected)) in numbers.into_iter().enumerate() {
            assert_eq!(field, expected, "number {nth}");
        }
        // SAFETY: both pointers refer to strings that `raw` owns, and `raw` is live.
        let strings = [set.comm_name, set.net_name].map(|at| unsafe { CStr::from_ptr(at) });
        assert_eq!(strings, [c"dp", c"Socket"]);

        let mut raw = CommOptions::default().to_raw("dp").unwrap();
        let set: &sys::Config = raw.as_mut();
        assert_eq!(set.blocking, 1);
        assert!(set.net_name.is_null());
        assert_eq!(set.max_ctas, c_int::MIN);
        let refused = CommOptions::default().to_raw("d\0p").err().unwrap();
        assert!(
            refused.to_string().contains("holds a NUL byte"),
            "{refused}"
        );
    }
}
