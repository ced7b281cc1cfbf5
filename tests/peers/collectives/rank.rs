//! A rank of rcomm, which speaks the protocol that `mpi.c` describes.

use crate::{MAX_COUNT, probe};
use anyhow::{Context, Result};
use rcomm::{Buffer, Config, ProcessGroup, ReduceOp, World};
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::time::Instant;

const MAX_BYTES: usize = 64 << 20;

/// A peer whose name begins with this uses buffers that the group allocated.
pub(crate) const REGISTERED: &str = "rcomm-registered";

/// The prefix of an operation before which each rank writes to every cache line of its buffers.
const FRESH: &str = "fresh_";

/// Runs the operations that the measuring program asks for, until it closes the connection.
pub(crate) fn serve(port: u16, name: &str) -> Result<()> {
    if let Some(core) = std::env::var("PEER_CORE")
        .ok()
        .and_then(|core| core.parse().ok())
    {
        probe::pin_to(core);
    }
    let world = World::init(Config::from_environment()?).context("failed to start")?;
    let mut control = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    control.set_nodelay(true)?;
    control.write_all(format!("{name} {}\n", world.rank()).as_bytes())?;
    let len = MAX_BYTES / 4;
    let memory = || match name.starts_with(REGISTERED) {
        true => world.group().allocate::<f32>(len),
        false => Ok(Buffer::from_vec(vec![0.0_f32; len])),
    };
    let (mut input, mut output) = (memory()?, memory()?);
    let message = "the buffer is not of f32 in host memory";
    let output = output.as_mut_slice::<f32>().context(message)?;
    let input = input.as_mut_slice::<f32>().context(message)?;
    // Zeroed memory has no pages before it is written.
    output.fill(0.0);
    input.fill(0.0);
    let mut times = Vec::with_capacity(MAX_COUNT);
    for line in BufReader::new(control.try_clone()?).lines() {
        let line = line?;
        let answer = match parse(&line) {
            Some((operation, bytes, count)) => {
                let (operation, is_fresh) = match operation.strip_prefix(FRESH) {
                    Some(operation) => (operation, true),
                    None => (operation, false),
                };
                for _ in 0..count / 8 {
                    call(world.group(), operation, bytes, input, output)?;
                }
                world.group().barrier()?;
                times.clear();
                let mut last = Instant::now();
                for _ in 0..count {
                    if is_fresh {
                        write_lines(input, bytes);
                        write_lines(output, bytes);
                        world.group().barrier()?;
                        last = Instant::now();
                    }
                    call(world.group(), operation, bytes, input, output)?;
                    let now = Instant::now();
                    times.push((now - last).as_secs_f64() * 1e6);
                    last = now;
                }
                times.sort_by(f64::total_cmp);
                let (p50, p99) = (times[count / 2], times[count * 99 / 100]);
                format!("{p50:.4} {p99:.4} {:.4}\n", times[0])
            }
            None => "unsupported\n".to_owned(),
        };
        control.write_all(answer.as_bytes())?;
    }
    world.shutdown()?;
    Ok(())
}

/// The operation, the bytes and the count of an order; `None` if one of them is not supported.
fn parse(line: &str) -> Option<(&str, usize, usize)> {
    const KNOWN: [&str; 7] = [
        "all_reduce",
        "barrier",
        "broadcast",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "send_recv",
    ];
    let mut words = line.split(' ');
    let is_known = |name: &&str| KNOWN.contains(&name.strip_prefix(FRESH).unwrap_or(name));
    let operation = words.next().filter(is_known)?;
    let bytes = words
        .next()?
        .parse()
        .ok()
        .filter(|&bytes| bytes <= MAX_BYTES)?;
    let count = words.next()?.parse().ok()?;
    (1..=MAX_COUNT)
        .contains(&count)
        .then_some((operation, bytes, count))
}

/// Writes to each cache line of the first `bytes` bytes, as a caller does who computes what is sent.
fn write_lines(buffer: &mut [f32], bytes: usize) {
    let len = (bytes / 4).min(buffer.len());
    for value in buffer[..len].iter_mut().step_by(16) {
        *value = std::hint::black_box(0.0);
    }
}

/// Runs an operation once. In `send_recv`, ranks 0 and 1 send a message there and back, and the others do nothing.
fn call(
    group: &ProcessGroup,
    operation: &str,
    bytes: usize,
    input: &[f32],
    output: &mut [f32],
) -> rcomm::Result<()> {
    let ranks = group.size() as usize;
    let count = (bytes / 4).max(1);
    let part = (count / ranks).max(1);
    match operation {
        "all_reduce" => group.all_reduce(&mut output[..count], ReduceOp::Sum),
        "barrier" => group.barrier(),
        "broadcast" => group.broadcast(&mut output[..count], 0),
        "all_gather" => group.all_gather_single(&input[..part], &mut output[..part * ranks]),
        "reduce_scatter" => {
            group.reduce_scatter_single(&input[..part * ranks], &mut output[..part], ReduceOp::Sum)
        }
        "all_to_all" => {
            group.all_to_all_single(&input[..part * ranks], &mut output[..part * ranks])
        }
        "send_recv" if group.rank() == 0 => {
            group.send(&input[..count], 1, 0)?;
            group.recv(&mut output[..count], 1, 0)
        }
        "send_recv" if group.rank() == 1 => {
            group.recv(&mut output[..count], 0, 0)?;
            group.send(&input[..count], 0, 0)
        }
        _ => Ok(()),
    }
}
