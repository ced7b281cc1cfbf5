//! Ranks on different hosts connect to each other over the expected addresses, and over TLS.
//!
//! In the tests of the addresses of two hosts, these are network namespaces with veth pairs between them, and ranks are
//! processes: this program starts itself once for each rank. In the other tests ranks are threads, some of them with
//! the names of two hosts.
#![allow(clippy::unwrap_used, clippy::print_stderr)]

#[path = "../../recorder/tests/certificates/mod.rs"]
mod certificates;

use certificates::Ca;
use rcomm::config::{EndpointChoice, RingDir, TransportChoice};
use rcomm::{Config, ErrorKind, GroupOptions, ProcessGroup, ReduceOp, Rendezvous, TcpStore, World};
use rcomm_recorder::publish::EndpointClient;
use std::io::Read;
use std::io::Write as _;
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::time::Duration;

const HOSTS: usize = 2;
const RANKS_PER_HOST: usize = 2;
/// Much longer than any step takes.
const LONG: Duration = Duration::from_secs(60);

/// The value that the CPU backend has stored under a key that ends in `cpu/<kind>/<rank>`.
fn stored_value(world: &World, kind: &str, rank: usize) -> String {
    let end = format!("cpu/{kind}/{rank}");
    let keys = world.store().list_keys().unwrap();
    let key = keys.iter().find(|key| key.ends_with(&end)).unwrap();
    String::from_utf8(world.store().get(key, LONG).unwrap()).unwrap()
}

fn addresses(world: &World, rank: usize) -> Vec<SocketAddr> {
    let stored = stored_value(world, "addr", rank);
    let addresses = stored.split(',');
    addresses.map(|address| address.parse().unwrap()).collect()
}

/// Runs ranks 0 and 1 on threads of this process, with a store on ::1, and checks that they use ::1.
fn check_on_ipv6_loopback(socket_ifname: Option<&str>) {
    // With port 0 the kernel chooses a free port, so that tests do not compete for one.
    let store = TcpStore::host("::1", 0, LONG).unwrap();
    let port = store.port();
    let mut hosted = Some(store);
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let config = Config {
                rendezvous: Some(Rendezvous::explicit(rank, 2, "::1", port).unwrap()),
                transport: TransportChoice::Tcp,
                socket_ifname: socket_ifname.map(str::to_owned),
                timeout: LONG,
                ring_dir: RingDir::Memory,
                ..Config::default()
            };
            let store = match hosted.take() {
                Some(store) => store,
                None => TcpStore::connect("::1", port, LONG).unwrap(),
            };
            scope.spawn(move || {
                let world = World::builder(config).store(Arc::new(store));
                let world = world.init().unwrap();
                let mut data = vec![rank + 1; 100_000];
                world.group().all_reduce(&mut data, ReduceOp::Sum).unwrap();
                assert!(data.iter().all(|&sum| sum == 3));
                for rank in 0..2 {
                    let addresses = addresses(&world, rank);
                    assert_eq!(addresses.len(), 1);
                    assert_eq!(addresses[0].ip().to_string(), "::1");
                }
                world.shutdown().unwrap();
            });
        }
    });
}

fn has_ipv6_loopback() -> bool {
    let exists = std::net::TcpListener::bind(("::1", 0)).is_ok();
    if !exists {
        let _ = writeln!(std::io::stderr(), "skipped: this host has no ::1");
    }
    exists
}

#[test]
fn ranks_use_ipv6_if_the_store_has_an_ipv6_address() {
    if has_ipv6_loopback() {
        check_on_ipv6_loopback(None);
    }
}

#[test]
fn ranks_use_the_address_family_of_the_store_on_a_named_interface() {
    if has_ipv6_loopback() {
        check_on_ipv6_loopback(Some("lo"));
    }
}

#[test]
fn an_unknown_interface_is_refused_with_a_list_of_the_existing_ones() {
    let store = TcpStore::host("127.0.0.1", 0, LONG).unwrap();
    let rendezvous = Rendezvous::explicit(0, 1, "127.0.0.1", store.port()).unwrap();
    let config = Config {
        rendezvous: Some(rendezvous),
        socket_ifname: Some("no-such0".to_owned()),
        ring_dir: RingDir::Memory,
        ..Config::default()
    };
    let world = World::builder(config).store(Arc::new(store));
    let error = world.init().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    let message = error.to_string();
    assert!(message.contains("\"no-such0\""), "{message}");
    assert!(message.contains("lo (127.0.0.1"), "{message}");
}

/// Calls `run_rank` for each of four ranks on two simulated hosts, on threads. Each rank has an identity of the CA that
/// `ca_of` gives for it, or no TLS.
fn on_two_hosts(
    ca_of: impl Fn(u32) -> Option<&'static Ca> + Sync,
    run_rank: impl Fn(Config) + Sync,
) {
    let folder = tempfile::tempdir().unwrap();
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = free.local_addr().unwrap().port();
    drop(free);
    std::thread::scope(|scope| {
        for rank in 0..4 {
            let (ca_of, run_rank, folder) = (&ca_of, &run_rank, folder.path());
            scope.spawn(move || {
                let mut rendezvous = Rendezvous::explicit(rank, 4, "127.0.0.1", port).unwrap();
                rendezvous.local_rank = Some(rank % 2);
                rendezvous.local_world_size = Some(2);
                run_rank(Config {
                    rendezvous: Some(rendezvous),
                    tls: ca_of(rank).map(|ca| ca.issue(folder, &format!("rank{rank}"))),
                    secret: Some(rcomm::Secret::from_text("of this test")),
                    endpoint: EndpointChoice::Tcp(([127, 0, 0, 1], 0).into()),
                    host_id: Some((rank / 2).to_string()),
                    timeout: LONG,
                    init_timeout: LONG,
                    ring_dir: RingDir::Memory,
                    ..Config::default()
                });
            });
        }
    });
}

#[test]
fn a_job_on_two_hosts_works_over_tls() {
    static CA: std::sync::LazyLock<Ca> = std::sync::LazyLock::new(Ca::new);
    for (transport, streams) in [
        (TransportChoice::Auto, "1"),
        (TransportChoice::Tcp, "1"),
        (TransportChoice::Tcp, "3"),
    ] {
        let work = |mut config: Config| {
            config.transport = transport;
            config
                .tuning
                .prepend(&format!("streams {streams}"))
                .unwrap();
            let tls = config.read_tls().unwrap();
            let world = World::init(config).unwrap();
            let group = world.group();
            // Callers of the data ports that stop in the handshake.
            let _stalled: Vec<TcpStream> = (0..32)
                .map(|index| {
                    let mut caller = TcpStream::connect(addresses(&world, index % 4)[0]).unwrap();
                    caller
                        .write_all(&[0x16, 3, 1, 2, 0, 1][..index % 6])
                        .unwrap();
                    caller
                })
                .collect();
            for count in [1, 3, 70_001, 1 << 20] {
                let mut data = vec![f64::from(group.rank() + 1); count];
                group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                assert!(data.iter().all(|&sum| sum == 10.0), "{count} numbers");
            }
            check_operations_between_hosts(group);
            // Messages both ways at the same time, short and long, to a rank of the other host.
            let other = (group.rank() + 2) % 4;
            for count in [1, 100_000, 2_000_000] {
                let sent = vec![group.rank() as u8; count];
                let mut received = vec![0_u8; count];
                std::thread::scope(|scope| {
                    scope.spawn(|| group.send(&sent, other, 7).unwrap());
                    group.recv(&mut received, other, 7).unwrap();
                });
                assert!(received.iter().all(|&byte| u32::from(byte) == other));
            }
            let token = rcomm::Secret::from_text("of this test").endpoint_token();
            let address = world.endpoint().unwrap().clone();
            let client = EndpointClient::new(address, Some(token)).with_tls(tls);
            let status = client.status(std::time::Instant::now() + LONG).unwrap();
            assert_eq!(status.identity.rank, Some(world.rank()));
            group.barrier().unwrap();
            world.shutdown().unwrap();
        };
        on_two_hosts(|_| Some(&CA), work);
    }
}

#[test]
fn a_rank_without_tls_or_with_another_ca_gets_an_error_with_the_reason() {
    static CAS: std::sync::LazyLock<[Ca; 2]> = std::sync::LazyLock::new(|| [Ca::new(), Ca::new()]);
    for (theirs, expected) in [
        (None, "takes TLS only, and this process has none"),
        (
            Some(&CAS[1]),
            "certificate is not from the CA of this process",
        ),
    ] {
        let ca_of = |rank| if rank == 3 { theirs } else { Some(&CAS[0]) };
        let start = |mut config: Config| {
            let rank = config.rendezvous.as_ref().unwrap().rank;
            // The others wait for the rank as they wait for one that never starts.
            config.init_timeout = if rank == 3 {
                LONG
            } else {
                Duration::from_secs(3)
            };
            let error = World::init(config).err().unwrap().to_string();
            match rank {
                3 => assert!(error.contains(expected), "{error}"),
                _ => assert!(error.contains("rank 3"), "{error}"),
            }
        };
        on_two_hosts(ca_of, start);
    }
}

/// How many bytes this host has received over a network interface.
fn received_bytes(interface: &str) -> u64 {
    let table = std::fs::read_to_string("/proc/net/dev").unwrap();
    let mut rows = table.lines().filter_map(|row| row.split_once(':'));
    let row = rows.find(|(name, _)| name.trim() == interface);
    let first = row.and_then(|(_, counts)| counts.split_whitespace().next());
    first.unwrap().parse().unwrap()
}

/// The body of a rank's process; does nothing when the tests are run.
#[test]
fn rank_process() {
    let Ok(network) = std::env::var("BETWEEN_HOSTS_NETWORK") else {
        return;
    };
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .init();
    let world = World::init(Config::from_environment().unwrap()).unwrap();
    let rank = world.rank();
    let ranks: Vec<u32> = (0..world.size()).collect();
    let second_group = world.new_group(&ranks, &GroupOptions::named("again"));
    for group in [world.group(), &second_group.unwrap()] {
        for count in [1, 300_000] {
            let mut data = vec![f64::from(rank + 1); count];
            group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            assert!(data.iter().all(|&sum| sum == 10.0));
        }
    }
    check_operations_between_hosts(world.group());
    for peer in 0..HOSTS * RANKS_PER_HOST {
        let used = addresses(&world, peer);
        let expected = network.split(',');
        let expected = expected.map(|network| format!("{network}{}", peer / RANKS_PER_HOST + 1));
        let used = used.iter().map(|address| address.ip().to_string());
        assert!(used.eq(expected), "rank {peer}");
    }
    if network.contains(',') {
        // Each of the sockets between two ranks has carried its part of some megabytes.
        for cable in ["data", "more"] {
            let bytes = received_bytes(cable);
            assert!(bytes > 1 << 20, "{bytes} bytes came over {cable}");
        }
    }
    let host = |rank| stored_value(&world, "host_of", rank);
    assert_eq!(host(0), host(1));
    assert_eq!(host(2), host(3));
    assert_ne!(host(0), host(2));
    assert!((0..4).all(|rank| host(rank) != "-"));
    world.shutdown().unwrap();
}

/// Runs collectives that have an algorithm of their own between hosts, each with few and with many bytes, and checks
/// their results. All-reduces, gathers and scatters are not among them.
fn check_operations_between_hosts(group: &ProcessGroup) {
    let (rank, size) = (group.rank() as usize, group.size() as usize);
    let input = |rank: usize, count: usize| -> Vec<u64> {
        (0..count)
            .map(|index| (rank * 1000 + index) as u64)
            .collect()
    };
    for count in [1, 40_000] {
        group.barrier().unwrap();
        let root = size - 1;
        let mut data = input(rank, count);
        group.broadcast(&mut data, root as u32).unwrap();
        assert_eq!(data, input(root, count));

        let mut gathered = vec![0; count * size];
        group
            .all_gather_single(&input(rank, count), &mut gathered)
            .unwrap();
        let expected: Vec<u64> = (0..size).flat_map(|rank| input(rank, count)).collect();
        assert_eq!(gathered, expected);

        let mut part = vec![0; count];
        let all_parts = input(rank, count * size);
        group
            .reduce_scatter_single(&all_parts, &mut part, ReduceOp::Sum)
            .unwrap();
        let sum = |index: usize| {
            (0..size)
                .map(|rank| input(rank, index + 1)[index])
                .sum::<u64>()
        };
        assert_eq!(part[0], sum(rank * count));
        assert_eq!(part[count - 1], sum((rank + 1) * count - 1));

        let mut data = input(rank, count);
        group.reduce(&mut data, ReduceOp::Max, 1).unwrap();
        // Rank 1 gets the values of the last rank, which are the largest; the others keep theirs.
        let expected_rank = if rank == 1 { size - 1 } else { rank };
        assert_eq!(data, input(expected_rank, count));
        let mut swapped = vec![0; count * size];
        group.all_to_all_single(&all_parts, &mut swapped).unwrap();
        for (sender, part) in swapped.chunks_exact(count).enumerate() {
            assert_eq!(part[0], (sender * 1000 + rank * count) as u64);
        }
    }
}

fn ip(arguments: &str) -> std::io::Result<Output> {
    Command::new("ip").args(arguments.split(' ')).output()
}

/// Two hosts with two veth pairs: `data` with 10.77.1.0/24 and fd77:1::/64, `more` with 10.77.2.0/24.
struct Network {
    names: [String; HOSTS],
}

impl Network {
    /// Makes the network. Returns `None`, and prints the reason, if this process may not make network namespaces.
    fn make(purpose: &str) -> Option<Self> {
        let pid = std::process::id();
        let names = ["a", "b"].map(|end| format!("rcomm-{pid}-{purpose}-{end}"));
        let network = Self { names };
        for name in &network.names {
            let reason = match ip(&format!("netns add {name}")) {
                Ok(made) if made.status.success() => continue,
                Ok(refused) => String::from_utf8_lossy(&refused.stderr).into_owned(),
                Err(error) => format!("ip: {error}"),
            };
            let _ = writeln!(
                std::io::stderr(),
                "skipped: cannot make network namespaces: {}",
                reason.trim()
            );
            return None;
        }
        let run = |arguments: &str| {
            let output = ip(arguments).unwrap();
            let reason = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "ip {arguments}: {reason}");
        };
        let [first, second] = &network.names;
        for cable in ["data", "more"] {
            run(&format!(
                "-n {first} link add {cable} type veth peer name {cable} netns {second}"
            ));
        }
        for (name, host) in network.names.iter().zip(1..) {
            for cable in ["lo", "data", "more"] {
                run(&format!("-n {name} link set {cable} up"));
            }
            run(&format!("-n {name} addr add 10.77.1.{host}/24 dev data"));
            run(&format!(
                "-n {name} addr add fd77:1::{host}/64 dev data nodad"
            ));
            run(&format!("-n {name} addr add 10.77.2.{host}/24 dev more"));
        }
        Some(network)
    }

    /// Runs ranks 0 and 1 on the first host, 2 and 3 on the second. `expected` is a list of beginnings of addresses,
    /// separated by commas; checks that the addresses of each rank are these, each followed by the number of its host.
    /// The name `first` resolves to the first host's address on the second host, and to one of the loopback interface
    /// on the first.
    fn run(&self, master_addr: &str, socket_ifname: Option<&str>, expected: &str, streams: usize) {
        let folder = tempfile::tempdir().unwrap();
        for (host, hosts_line) in ["127.0.1.1 first", "10.77.1.1 first"].iter().enumerate() {
            std::fs::write(folder.path().join(host.to_string()), hosts_line).unwrap();
        }
        let world_size = HOSTS * RANKS_PER_HOST;
        let ranks = (0..world_size).map(|rank| {
            let host = rank / RANKS_PER_HOST;
            let mut command = Command::new("ip");
            command
                .args(["netns", "exec", &self.names[host]])
                // `ip netns exec` gives the process a mount namespace of its own, so no other process sees the mount.
                .args(["sh", "-c", r#"mount --bind "$0" /etc/hosts && exec "$@""#])
                .arg(folder.path().join(host.to_string()))
                .arg(std::env::current_exe().unwrap())
                .args(["--exact", "rank_process", "--nocapture"])
                .env("BETWEEN_HOSTS_NETWORK", expected)
                .env("RANK", rank.to_string())
                .env("WORLD_SIZE", world_size.to_string())
                .env("LOCAL_RANK", (rank % RANKS_PER_HOST).to_string())
                .env("LOCAL_WORLD_SIZE", RANKS_PER_HOST.to_string())
                .env("MASTER_ADDR", master_addr)
                .env("MASTER_PORT", "29500")
                .env("RCOMM_TIMEOUT_MS", LONG.as_millis().to_string())
                .env("RCOMM_RING_DIR", "memory")
                .env("RCOMM_SOCKET_STREAMS", streams.to_string())
                .env_remove("GLOO_SOCKET_IFNAME")
                .env_remove("RCOMM_SOCKET_IFNAME")
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::piped());
            if let Some(name) = socket_ifname {
                command.env("RCOMM_SOCKET_IFNAME", name);
            }
            command.spawn().unwrap()
        });
        let mut ranks = Ranks(ranks.collect());
        for (rank, child) in ranks.0.iter_mut().enumerate() {
            let mut log = String::new();
            let mut stderr = child.stderr.take().unwrap();
            stderr.read_to_string(&mut log).unwrap();
            let status = child.wait().unwrap();
            assert!(status.success(), "rank {rank}: {status}: {log}");
            // The namespaces are on one machine, so each rank logs once that it shares no memory with the others.
            let count = log.matches("no memory is shared with it").count();
            assert_eq!(count, 1, "rank {rank}: {log}");
        }
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for name in &self.names {
            // The namespace may not exist. Its veth pairs are deleted with it.
            let _ = ip(&format!("netns del {name}"));
        }
    }
}

/// Kills the processes that still run when a test fails.
struct Ranks(Vec<Child>);

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // Most processes have ended by themselves.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[test]
fn ranks_of_two_hosts_use_the_addresses_of_the_route_to_the_store() {
    if let Some(network) = Network::make("v4") {
        network.run("10.77.1.1", None, "10.77.1.", 1);
    }
}

#[test]
fn ranks_of_two_hosts_use_the_named_interface() {
    if let Some(network) = Network::make("named") {
        network.run("10.77.1.1", Some("more"), "10.77.2.", 2);
    }
}

#[test]
fn connections_of_two_hosts_are_spread_over_two_networks() {
    if let Some(network) = Network::make("both") {
        network.run("10.77.1.1", Some("more, data"), "10.77.2.,10.77.1.", 2);
    }
}

#[test]
fn ranks_of_two_hosts_use_ipv6_if_the_store_does() {
    if let Some(network) = Network::make("v6") {
        network.run("fd77:1::1", None, "fd77:1::", 1);
    }
}

#[test]
fn ranks_are_reached_if_their_host_resolves_the_stores_name_to_its_loopback() {
    if let Some(network) = Network::make("hidden") {
        network.run("first", None, "10.77.1.", 1);
    }
}
