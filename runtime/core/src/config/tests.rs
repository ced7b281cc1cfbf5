//! How variables set the options.

use super::*;

fn config_of(pairs: &[(&str, &str)]) -> Result<Config> {
    Config::from_lookup(|name| {
        let pair = pairs.iter().find(|(key, _)| *key == name);
        pair.map(|(_, value)| (*value).to_owned())
    })
}

#[test]
fn variables_that_are_set_override_the_defaults() {
    let config = config_of(&[
        ("RCOMM_TIMEOUT_MS", "1500"),
        ("RCOMM_JOIN", "1"),
        ("GLOO_SOCKET_IFNAME", "eth1,eth2"),
        ("RCOMM_DUMP_PIPE", "/tmp/a"),
        ("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "/tmp/b"),
        ("RCOMM_RING_DIR", "memory"),
        ("RCOMM_RING_KEEP_JOBS", "3"),
        ("RCOMM_RING_KEEP_MIB", "64"),
        ("RCOMM_ENDPOINT", "tcp:127.0.0.1:0"),
    ])
    .unwrap();
    assert_eq!(config.timeout, Duration::from_millis(1500));
    assert!(config.joins);
    assert_eq!(config.socket_ifname.as_deref(), Some("eth1,eth2"));
    assert_eq!(config.ring_dir, RingDir::Memory);
    let kept = KeptJobs {
        jobs: 3,
        bytes: 64 << 20,
    };
    assert_eq!(config.kept_jobs, kept);
    assert_eq!(config.dump_pipes.len(), 2);
    let any_port = SocketAddr::from(([127, 0, 0, 1], 0));
    assert_eq!(config.endpoint, EndpointChoice::Tcp(any_port));
}

#[test]
fn rcomms_variable_has_precedence_over_gloos() {
    let config = config_of(&[
        ("GLOO_SOCKET_IFNAME", "eth1"),
        ("RCOMM_SOCKET_IFNAME", "eth0"),
    ])
    .unwrap();
    assert_eq!(config.socket_ifname.as_deref(), Some("eth0"));
}

#[test]
fn pytorchs_variables_are_read_in_their_units_and_rcomms_have_precedence() {
    let theirs = [
        ("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "480"),
        ("TORCH_NCCL_COORD_CHECK_MILSEC", "250"),
        ("TORCH_NCCL_NONBLOCKING_TIMEOUT", "30"),
        ("TORCH_FR_BUFFER_SIZE", "2000"),
    ];
    let config = config_of(&theirs).unwrap();
    assert_eq!(config.heartbeat_timeout, Duration::from_secs(480));
    assert_eq!(config.signal_interval, Duration::from_millis(250));
    assert_eq!(config.init_timeout, Duration::from_secs(30));
    assert_eq!(config.ring_entries, 2000);
    let ours = [
        ("RCOMM_HEARTBEAT_TIMEOUT_MS", "5000"),
        ("RCOMM_SIGNAL_INTERVAL_MS", "70"),
        ("RCOMM_INIT_TIMEOUT_MS", "900"),
        ("RCOMM_RING_ENTRIES", "10"),
    ];
    let config = config_of(&[&theirs[..], &ours[..]].concat()).unwrap();
    assert_eq!(config.heartbeat_timeout, Duration::from_secs(5));
    assert_eq!(config.signal_interval, Duration::from_millis(70));
    assert_eq!(config.init_timeout, Duration::from_millis(900));
    assert_eq!(config.ring_entries, 10);
    // 0 turns PyTorch's recorder off. Ours stays on, and its ring keeps its size.
    let zero = config_of(&[("TORCH_NCCL_TRACE_BUFFER_SIZE", "0")]).unwrap();
    assert_eq!(zero.ring_entries, Config::default().ring_entries);
}

#[test]
fn the_size_of_a_ring_is_given_in_operations_steps_or_mebibytes() {
    let size = |pairs: &[(&str, &str)]| {
        let config = config_of(pairs).unwrap();
        (config.ring_entries, config.ring_mib)
    };
    assert_eq!(size(&[("RCOMM_RING_ENTRIES", "500")]), (500, None));
    assert_eq!(size(&[("RCOMM_RING_STEPS", "8x1250")]), (10_000, None));
    assert_eq!(size(&[("RCOMM_RING_STEPS", " 3 x 7 ")]), (21, None));
    let theirs = ("TORCH_FR_BUFFER_SIZE", "2000");
    assert_eq!(size(&[("RCOMM_RING_MIB", "16"), theirs]), (2_000, Some(16)));
    assert_eq!(size(&[theirs, ("RCOMM_RING_STEPS", "2x9")]), (18, None));
    let refusal = |pairs: &[(&str, &str)]| config_of(pairs).unwrap_err().to_string();
    assert_eq!(
        refusal(&[("RCOMM_RING_ENTRIES", "500"), ("RCOMM_RING_MIB", "4")]),
        "RCOMM_RING_ENTRIES and RCOMM_RING_MIB are both set: the ring has one size, so set one of them"
    );
    for wrong in ["8", "8*1250", "x", "0x5", "5x0", "1048576x2", "-1x4"] {
        let error = refusal(&[("RCOMM_RING_STEPS", wrong)]);
        assert!(error.contains("8x1250"), "{wrong}: {error}");
    }
    assert!(refusal(&[("RCOMM_RING_MIB", "0")]).contains("at least 1"));
}

#[test]
fn debug_checks_are_set_by_rcomms_or_pytorchs_variables() {
    let debug = |pairs: &[(&str, &str)]| config_of(pairs).unwrap().debug;
    assert_eq!(debug(&[]), DebugLevel::Off);
    let theirs = ("TORCH_DISTRIBUTED_DEBUG", "DETAIL");
    assert_eq!(debug(&[theirs]), DebugLevel::Detail);
    assert_eq!(debug(&[theirs, ("RCOMM_DEBUG", "off")]), DebugLevel::Off);
    let config = config_of(&[("TORCH_NCCL_NAN_CHECK", "1")]).unwrap();
    assert_eq!(config.nan_check, NanCheck::On);
    assert!(config_of(&[("RCOMM_DEBUG", "loud")]).is_err());
}

#[test]
fn a_wrong_value_gives_an_error_that_names_the_variable() {
    let refusal = |name, value| config_of(&[(name, value)]).unwrap_err().to_string();
    assert_eq!(
        refusal("RCOMM_TIMEOUT_MS", "10s"),
        "RCOMM_TIMEOUT_MS is \"10s\": it must be a whole number without a sign"
    );
    assert_eq!(
        refusal("RCOMM_RING_MIB", "4294967296"),
        "RCOMM_RING_MIB is \"4294967296\": it must be at most 4294967295"
    );
    assert_eq!(
        refusal("RCOMM_TRANSPORT", "carrier pigeon"),
        "RCOMM_TRANSPORT is \"carrier pigeon\": it must be auto, shm or tcp"
    );
    let lines = refusal("RCOMM_TUNING", "all_reduce sockets any 1X notice");
    assert!(lines.starts_with("RCOMM_TUNING: the line"), "{lines}");
    assert!(refusal("RCOMM_TUNING_FILE", "/no/such/file").contains("cannot read /no/such/file"));
    // This file has no end.
    let endless = refusal("RCOMM_TUNING_FILE", "/dev/zero");
    assert!(endless.contains("more than 1048576 bytes"), "{endless}");
    assert!(refusal("RCOMM_SOCKET_STREAMS", "17").contains("give 1 to 16"));
    assert!(refusal("RCOMM_ENDPOINT", "tcp:node1:1").contains("tcp:ADDRESS:PORT"));
    assert!(refusal("RCOMM_ENDPOINT", "tcp:0.0.0.0:0").contains("one interface"));
    let short = refusal("RCOMM_ENDPOINT_TOKEN", "hunter2");
    assert!(
        short.contains("at least 16") && !short.contains("hunter2"),
        "{short}"
    );
    assert_eq!(
        refusal("RCOMM_RING_ENTRIES", "0"),
        "RCOMM_RING_ENTRIES is \"0\": it must be at least 1"
    );
}
