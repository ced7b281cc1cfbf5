//! Compares rcomm's store server with PyTorch's: operations per second, the time of a barrier and of a
//! connection, and the memory of an idle connection.
//!
//! `cargo run --release -p rcomm-tests --bin peers-store [-- --rounds 9]`, with `RCOMM_TEST_PYTHON` naming
//! a Python that has torch. Both servers are processes of their own. This program is the client of both, by
//! turns, so that a machine that speeds up or slows down does so for both. The clients have one core and
//! the servers another, unless `--anywhere` is given: the system often puts the two sides of a connection
//! on one core, and then the core limits both. The program prints the medians over the rounds, and the
//! median, min and max of the ratio within a round (above 1: rcomm is better). Without torch, rcomm is
//! measured alone and the program prints that.

#![allow(clippy::print_stdout, clippy::print_stderr)]

use anyhow::{Context, Result, bail, ensure};
use clap::{Parser, Subcommand};
use rcomm::store::{Store, TcpStore, TcpStoreServer};
use rcomm_tests::statistics::median;
use rustix::event::epoll;
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit, setrlimit};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    command: Option<Serve>,
    /// How often both servers are measured, by turns.
    #[arg(long, default_value_t = 9)]
    rounds: usize,
    /// Lets the system choose the cores of the load and of the servers.
    #[arg(long)]
    anywhere: bool,
    /// Measures only the rows whose names contain this.
    #[arg(long, default_value = "")]
    only: String,
    /// Seconds for each throughput measurement.
    #[arg(long, default_value_t = 0.3)]
    seconds: f64,
}

#[derive(Subcommand)]
enum Serve {
    /// Serves our store until standard input ends; prints the port.
    Serve,
}

/// A row of PyTorch's server says `stalled` if the server does not answer for this long.
const READ_TIMEOUT: Duration = Duration::from_secs(4);

/// The program of PyTorch's server, which prints its port.
const PYTORCH: &str = "
import sys, torch.distributed as dist
store = dist.TCPStore('127.0.0.1', 0, None, True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
";

/// A store server in a process of its own, which ends with its standard input.
struct Server {
    process: Child,
    port: u16,
    /// The Python that runs PyTorch's server; `None` for our server.
    python: Option<String>,
}

impl Server {
    fn start(mut command: Command, python: Option<String>) -> Result<Self> {
        let mut process = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .with_context(|| format!("cannot start {command:?}"))?;
        let stdout = process
            .stdout
            .take()
            .context("standard output is not piped")?;
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line)?;
        let port = line.trim().parse();
        let port = port.with_context(|| format!("{command:?} printed {line:?}, not a port"))?;
        Ok(Self {
            process,
            port,
            python,
        })
    }

    fn ours() -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("serve");
        Self::start(command, None)
    }

    fn pytorch(python: &str) -> Result<Self> {
        let mut command = Command::new(python);
        command.args(["-c", PYTORCH]);
        Self::start(command, Some(python.to_owned()))
    }

    /// Starts another server of the same kind.
    fn another(&self) -> Result<Self> {
        match &self.python {
            None => Self::ours(),
            Some(python) => Self::pytorch(python),
        }
    }

    /// Connects, and waits for the answer to a ping.
    fn dial(&self) -> Result<TcpStream> {
        let mut socket = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port))?;
        socket.set_nodelay(true)?;
        socket.set_read_timeout(Some(READ_TIMEOUT))?;
        socket.write_all(b"\x00\xCE\xF7\x85\x3C\x0Dping")?;
        socket.read_exact(&mut [0; 4])?;
        Ok(socket)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.process.stdin.take());
        if self.process.wait().is_err() {
            eprintln!("a store server could not be waited for");
        }
    }
}

/// A string as the store's protocol has it: its length, then its bytes.
fn string(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u64).to_le_bytes(), bytes].concat()
}

/// One operation of the load: its request for a connection's number, and the length of its reply.
#[derive(Clone, Copy, Debug)]
enum Operation {
    /// A SET, followed by a PING whose reply shows that it is done.
    Set,
    Get,
    Add,
}

impl Operation {
    fn request(self, connection: usize) -> Vec<u8> {
        let key = string(format!("/bench/{connection:06}").as_bytes());
        match self {
            Operation::Set => [
                &b"\x01"[..],
                &key,
                &string(b"0123456789abcdef"),
                b"\x0Ddone",
            ]
            .concat(),
            Operation::Get => [&b"\x03"[..], &key].concat(),
            Operation::Add => [
                &b"\x04"[..],
                &string(format!("/count/{connection:06}").as_bytes()),
                &1_i64.to_le_bytes(),
            ]
            .concat(),
        }
    }

    fn reply(self) -> usize {
        match self {
            Operation::Set => 4,
            Operation::Get => 24,
            Operation::Add => 8,
        }
    }
}

/// Operations per second of `connections`, each with `depth` requests in flight, driven by one thread.
fn throughput(
    server: &Server,
    operation: Operation,
    connections: usize,
    depth: usize,
    time: Duration,
) -> Result<f64> {
    struct Flow {
        socket: TcpStream,
        requests: Vec<u8>,
        replies: usize,
    }
    let poller = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    let mut flows = Vec::new();
    for index in 0..connections {
        let mut socket = server.dial()?;
        socket.write_all(&Operation::Set.request(index))?;
        socket.read_exact(&mut [0; 4])?;
        let data = epoll::EventData::new_u64(index as u64);
        epoll::add(&poller, &socket, data, epoll::EventFlags::IN)?;
        flows.push(Flow {
            socket,
            requests: operation.request(index).repeat(depth),
            replies: 0,
        });
    }
    let batch = operation.reply() * depth;
    let mut buffer = vec![0; 64 << 10];
    let mut events = Vec::with_capacity(256);
    let start = Instant::now();
    let mut done = 0;
    for flow in &mut flows {
        flow.socket.write_all(&flow.requests)?;
    }
    while start.elapsed() < time {
        events.clear();
        match epoll::wait(&poller, rustix::buffer::spare_capacity(&mut events), None) {
            Ok(_) => {}
            Err(Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
        }
        for event in &events {
            let data = event.data;
            let flow = &mut flows[data.u64() as usize];
            let count = flow.socket.read(&mut buffer)?;
            ensure!(count > 0, "the server closed a connection");
            flow.replies += count;
            if flow.replies == batch {
                flow.replies = 0;
                done += depth;
                flow.socket.write_all(&flow.requests)?;
            }
        }
    }
    let rate = done as f64 / start.elapsed().as_secs_f64();
    // Closing a connection that has unread replies resets it: read them first.
    for flow in &mut flows {
        while flow.replies < batch {
            let count = flow.socket.read(&mut buffer)?;
            ensure!(count > 0, "the server closed a connection");
            flow.replies += count;
        }
    }
    Ok(rate)
}

/// Round trips per second of one client that waits for each reply.
fn closed_loop(server: &Server, request: &[u8], reply: usize) -> Result<f64> {
    const TIMES: usize = 3000;
    let mut socket = server.dial()?;
    socket.write_all(&Operation::Set.request(0))?;
    socket.read_exact(&mut [0; 4])?;
    let mut answer = vec![0; reply];
    let start = Instant::now();
    for _ in 0..TIMES {
        socket.write_all(request)?;
        socket.read_exact(&mut answer)?;
    }
    Ok(TIMES as f64 / start.elapsed().as_secs_f64())
}

/// `get` calls per second of our client.
fn client_gets(server: &Server) -> Result<f64> {
    const TIMES: usize = 3000;
    let store = TcpStore::connect("127.0.0.1", server.port, Duration::from_secs(10))?;
    store.set("k", b"0123456789abcdef")?;
    let start = Instant::now();
    for _ in 0..TIMES {
        store.get("k", Duration::from_secs(10))?;
    }
    Ok(TIMES as f64 / start.elapsed().as_secs_f64())
}

/// The clock that measures a barrier.
#[derive(Clone, Copy)]
enum Clock {
    /// Elapsed time.
    Wall,
    /// Processor time of the server.
    Server,
    /// Processor time of the one thread that acts as all clients.
    Clients,
}

impl Clock {
    /// Seconds since an arbitrary moment.
    fn now(self, server: &Server) -> Result<f64> {
        use rustix::time::{ClockId, clock_gettime};
        let clock = match self {
            Clock::Wall => clock_gettime(ClockId::Monotonic),
            Clock::Clients => clock_gettime(ClockId::ThreadCPUTime),
            Clock::Server => {
                let mut nanoseconds = 0.0;
                for thread in std::fs::read_dir(format!("/proc/{}/task", server.process.id()))? {
                    let schedstat = std::fs::read_to_string(thread?.path().join("schedstat"))?;
                    let first = schedstat.split_whitespace().next();
                    let first = first.context("a thread's schedstat is empty")?;
                    nanoseconds += first.parse::<f64>()?;
                }
                return Ok(nanoseconds / 1e9);
            }
        };
        Ok(clock.tv_sec as f64 + clock.tv_nsec as f64 / 1e9)
    }
}

/// Barriers of `clients` clients, by the store's own request, per second of `clock`; one thread acts as all clients.
fn barriers(server: &Server, clients: usize, name: &mut u32, clock: Clock) -> Result<f64> {
    const TIMES: usize = 5;
    let mut sockets: Vec<TcpStream> = (0..clients).map(|_| server.dial()).collect::<Result<_>>()?;
    let start = clock.now(server)?;
    for _ in 0..TIMES {
        *name += 1;
        let request = [
            &b"\x12"[..],
            &string(format!("/barrier/{name}").as_bytes()),
            &(clients as i64).to_le_bytes(),
        ]
        .concat();
        for socket in &mut sockets {
            socket.write_all(&request)?;
        }
        for socket in &mut sockets {
            socket.read_exact(&mut [0])?;
        }
    }
    Ok(TIMES as f64 / (clock.now(server)? - start))
}

/// Connections per second that were made, validated and answered.
fn connects(server: &Server, clients: usize) -> Result<f64> {
    let start = Instant::now();
    let mut sockets = Vec::with_capacity(clients);
    for _ in 0..clients {
        let mut socket = TcpStream::connect((Ipv4Addr::LOCALHOST, server.port))?;
        socket.set_nodelay(true)?;
        socket.set_read_timeout(Some(READ_TIMEOUT))?;
        socket.write_all(b"\x00\xCE\xF7\x85\x3C\x0Dping")?;
        sockets.push(socket);
    }
    for socket in &mut sockets {
        socket.read_exact(&mut [0; 4])?;
    }
    Ok(clients as f64 / start.elapsed().as_secs_f64())
}

/// Connections per byte: `clients` connections that are idle after one request, by the growth of a new server's memory.
/// The result is not in bytes per connection because higher must be better in every row.
fn idle_memory(server: &Server, clients: usize) -> Result<f64> {
    let server = server.another()?;
    let resident = || -> Result<f64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", server.process.id()))?;
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("RssAnon:"));
        let kib = line.and_then(|line| line.trim().strip_suffix("kB"));
        let kib: f64 = kib
            .context("the server's status has no RssAnon")?
            .trim()
            .parse()?;
        Ok(kib * 1024.0)
    };
    // The first connection allocates memory that all share.
    drop(server.dial()?);
    let before = resident()?;
    let sockets: Vec<TcpStream> = (0..clients).map(|_| server.dial()).collect::<Result<_>>()?;
    let after = resident()?;
    let count = sockets.len() as f64;
    Ok(count / (after - before).max(1.0))
}

/// Raises the soft limit of open files to the hard one.
fn raise_descriptor_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    // If the limit stays too low, a later connection fails with an error.
    let _ = setrlimit(Resource::Nofile, limit);
}

/// Binds this thread, and the processes that it starts from now on, to one core.
fn pin_to(core: usize) -> Result<()> {
    let mut set = rustix::thread::CpuSet::new();
    set.set(core);
    rustix::thread::sched_setaffinity(None, &set)
        .with_context(|| format!("cannot bind to core {core}; try --anywhere"))
}

/// Measures a rate of a server.
type Measure = Box<dyn FnMut(&Server) -> Result<f64>>;

/// One row of the table: a rate of a server, of which more is better.
struct Row {
    name: String,
    unit: Unit,
    measure: Measure,
}

/// How a rate is printed.
#[derive(Clone, Copy)]
enum Unit {
    /// In thousands per second.
    PerSecond,
    /// As the microseconds of one operation.
    Micros,
    /// As the milliseconds of this many operations.
    MillisFor(f64),
    /// As the bytes of one connection.
    Bytes,
}

impl Unit {
    fn show(self, rate: f64) -> String {
        match self {
            Unit::PerSecond => format!("{:.0} k/s", rate / 1e3),
            Unit::Micros => format!("{:.1} us", 1e6 / rate),
            Unit::MillisFor(count) => format!("{:.2} ms", count * 1e3 / rate),
            Unit::Bytes => format!("{:.0} B", 1.0 / rate),
        }
    }
}

/// All rows of the table. Each throughput is measured for this time.
fn rows(time: Duration) -> Vec<Row> {
    let mut rows = Vec::new();
    for (connections, depth) in [(1, 32), (8, 16), (64, 16), (8, 1), (64, 1)] {
        for operation in [Operation::Set, Operation::Get, Operation::Add] {
            rows.push(Row {
                name: format!("{connections:>2} connections x {depth:>2} in flight, {operation:?}"),
                unit: Unit::PerSecond,
                measure: Box::new(move |server| {
                    throughput(server, operation, connections, depth, time)
                }),
            });
        }
    }
    rows.push(Row {
        name: "1 client, closed loop, PING".to_owned(),
        unit: Unit::Micros,
        measure: Box::new(|server| closed_loop(server, b"\x0Dping", 4)),
    });
    rows.push(Row {
        name: "1 client, closed loop, GET".to_owned(),
        unit: Unit::Micros,
        measure: Box::new(|server| closed_loop(server, &Operation::Get.request(0), 24)),
    });
    rows.push(Row {
        name: "our client, get".to_owned(),
        unit: Unit::Micros,
        measure: Box::new(client_gets),
    });
    for (index, (clock, measured)) in (0..).zip([
        (Clock::Wall, ""),
        (Clock::Server, ", the server's processor"),
        (Clock::Clients, ", the clients' processor"),
    ]) {
        // A name can be used for one barrier only.
        let mut name = index * 1_000_000;
        rows.push(Row {
            name: format!("native barrier of 1024{measured}"),
            unit: Unit::MillisFor(1.0),
            measure: Box::new(move |server| barriers(server, 1024, &mut name, clock)),
        });
    }
    rows.push(Row {
        name: "connect, validate, ping of 1024".to_owned(),
        unit: Unit::MillisFor(1024.0),
        measure: Box::new(|server| connects(server, 1024)),
    });
    rows.push(Row {
        name: "memory of each of 4096 idle connections".to_owned(),
        unit: Unit::Bytes,
        measure: Box::new(|server| idle_memory(server, 4096)),
    });
    rows
}

fn is_timeout(error: &anyhow::Error) -> bool {
    error
        .downcast_ref::<std::io::Error>()
        .is_some_and(|error| error.kind() == std::io::ErrorKind::WouldBlock)
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    if let Some(Serve::Serve) = arguments.command {
        let server = TcpStoreServer::bind(&[Ipv4Addr::LOCALHOST.into()], 0)?;
        println!("{}", server.port());
        std::io::stdin().read_to_end(&mut Vec::new())?;
        return Ok(());
    }
    if arguments.rounds == 0 {
        bail!("--rounds is 0: there is nothing to take a median of");
    }
    raise_descriptor_limit();
    let is_pinned = !arguments.anywhere && std::thread::available_parallelism()?.get() > 1;
    if is_pinned {
        pin_to(1)?;
    }
    let ours = Server::ours()?;
    let peer = match std::env::var("RCOMM_TEST_PYTHON") {
        Ok(python) => Some(Server::pytorch(&python)?),
        Err(_) => {
            eprintln!("skipped: PyTorch's server (RCOMM_TEST_PYTHON names no Python with torch)");
            None
        }
    };
    if is_pinned {
        pin_to(0)?;
    }
    println!(
        "{:<48} {:>12} {:>12}   ratio (min, max)",
        "", "rcomm", "PyTorch"
    );
    let mut rows = rows(Duration::from_secs_f64(arguments.seconds));
    rows.retain(|row| row.name.contains(&arguments.only));
    for mut row in rows {
        let (mut our_rates, mut their_rates, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
        let mut has_stalled = false;
        for _ in 0..arguments.rounds {
            let rate = (row.measure)(&ours).with_context(|| row.name.clone())?;
            our_rates.push(rate);
            if let (Some(peer), false) = (&peer, has_stalled) {
                match (row.measure)(peer) {
                    Ok(their_rate) => {
                        their_rates.push(their_rate);
                        ratios.push(rate / their_rate);
                    }
                    // PyTorch's server looks up the name of every client; without a resolver that takes seconds.
                    Err(error) if is_timeout(&error) => has_stalled = true,
                    Err(error) => return Err(error.context(row.name)),
                }
            }
        }
        let show = |rate| row.unit.show(rate);
        print!("{:<48} {:>12}", row.name, show(median(&mut our_rates)));
        if has_stalled {
            print!(" {:>12}   no answer within {READ_TIMEOUT:?}", "stalled");
        } else if peer.is_some() {
            let ratio = median(&mut ratios);
            print!(
                " {:>12}   {ratio:.2} ({:.2}, {:.2})",
                show(median(&mut their_rates)),
                ratios[0],
                ratios[ratios.len() - 1]
            );
        }
        println!();
    }
    Ok(())
}
