//! Reads the state of GPUs from `nvidia-smi`.

use super::Fact;
use rcomm_recorder::model::text::bytes;
use rcomm_verdict::format::{count, printable};
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The fields that are queried of each GPU, in the order of [`Gpu::parse`].
const FIELDS: [&str; 10] = [
    "index",
    "uuid",
    "name",
    "utilization.gpu",
    "temperature.gpu",
    "clocks.sm",
    "clocks.max.sm",
    "memory.used",
    "memory.total",
    "ecc.errors.uncorrected.volatile.total",
];
/// Further fields that are queried of each GPU, in the order of [`troubles_in`]. A driver that lacks one of them
/// answers nothing at all, so they are queried separately.
const TROUBLES: [&str; 5] = [
    "uuid",
    "retired_pages.pending",
    "remapped_rows.pending",
    "remapped_rows.failure",
    "clocks_throttle_reasons.active",
];
/// Reasons for which a GPU is slower than it could be, by their bits: those that are no cause of a delay, such as an
/// idle GPU, are left out.
const THROTTLES: [(u64, &str); 4] = [
    (0x08, "slowed down by the hardware"),
    (0x20, "slowed down by its temperature"),
    (0x40, "slowed down by the hardware for its temperature"),
    (0x80, "slowed down by its power supply"),
];
/// At most this many bytes of an answer are read.
const MOST_BYTES: u64 = 1024 * 1024;
/// The time between two checks whether the program has ended.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Why the state of the GPUs is not known.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Unread {
    /// The program cannot be started or fails, as it does where there is no GPU, or its output cannot be read.
    Absent,
    /// The program did not end before the deadline.
    NoAnswer,
}

/// The GPUs of this node, and the processes that use them.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Gpus {
    gpus: Vec<Gpu>,
    /// For each use of a GPU by a process: the process id and the GPU's UUID.
    used: Vec<(u32, String)>,
}

/// The state of a GPU; `None` for values that the GPU does not have.
#[derive(Debug, PartialEq)]
struct Gpu {
    index: u32,
    uuid: String,
    name: String,
    /// Utilization, in percent.
    utilization: Option<u64>,
    celsius: Option<u64>,
    clock_mhz: Option<u64>,
    top_clock_mhz: Option<u64>,
    used_mib: Option<u64>,
    total_mib: Option<u64>,
    /// Errors since the driver was loaded that ECC did not correct.
    memory_errors: Option<u64>,
    /// What else may delay operations on the GPU or make them fail.
    troubles: Vec<String>,
}

impl Gpus {
    /// Runs `program` three times: for the state of all GPUs, for what is wrong with them, and for the processes on
    /// them.
    ///
    /// # Blocking
    ///
    /// Until all runs end, at most until the deadline.
    pub(super) fn read(program: &Path, deadline: Instant) -> Result<Self, Unread> {
        let format = "--format=csv,noheader,nounits";
        let fields = format!("--query-gpu={}", FIELDS.join(","));
        let gpus = answer(program, &[&fields, format], deadline)?;
        let used = answer(
            program,
            &["--query-compute-apps=pid,gpu_uuid", format],
            deadline,
        )?;
        let mut gpus: Vec<Gpu> = gpus.lines().filter_map(Gpu::parse).collect();
        let fields = format!("--query-gpu={}", TROUBLES.join(","));
        match answer(program, &[&fields, format], deadline) {
            Ok(troubles) => {
                for (uuid, found) in troubles.lines().filter_map(troubles_in) {
                    let gpu = gpus.iter_mut().find(|gpu| gpu.uuid == uuid);
                    gpu.into_iter()
                        .for_each(|gpu| gpu.troubles.clone_from(&found));
                }
            }
            Err(Unread::Absent) => {}
            Err(Unread::NoAnswer) => return Err(Unread::NoAnswer),
        }
        Ok(Self {
            gpus,
            used: used.lines().filter_map(parse_use).collect(),
        })
    }

    /// The GPUs of a process: those that it uses, else the one that its environment gives it. In a container the
    /// process ids of `nvidia-smi` may be those of the host, or missing.
    pub(super) fn of_process(&self, pid: u32, environment: &[u8]) -> Vec<Fact> {
        let uses = |gpu: &&Gpu| {
            let mut used = self.used.iter();
            used.any(|(user, uuid)| *user == pid && *uuid == gpu.uuid)
        };
        let used: Vec<Fact> = self.gpus.iter().filter(uses).map(Gpu::fact).collect();
        if !used.is_empty() {
            return used;
        }
        let assigned = assigned_gpu(environment).and_then(|assigned| {
            self.gpus.iter().find(|gpu| match assigned.parse::<u32>() {
                Ok(index) => gpu.index == index,
                Err(_) => gpu.uuid == assigned,
            })
        });
        assigned.map(Gpu::fact).into_iter().collect()
    }
}

/// The GPU that an environment gives its process, as an index or a UUID: entry number `LOCAL_RANK` of
/// `CUDA_VISIBLE_DEVICES` or, if that is not set, the index `LOCAL_RANK`. `None` without a local rank or such an entry.
fn assigned_gpu(environment: &[u8]) -> Option<String> {
    let value = |name: &str| {
        let mut pairs = environment.split(|&byte| byte == 0);
        pairs.find_map(|pair| {
            std::str::from_utf8(pair)
                .ok()?
                .strip_prefix(name)?
                .strip_prefix('=')
        })
    };
    let local: usize = value("LOCAL_RANK")?.parse().ok()?;
    match value("CUDA_VISIBLE_DEVICES") {
        None => Some(local.to_string()),
        Some(visible) => Some(visible.split(',').nth(local)?.trim().to_owned()),
    }
}

/// The UUID in a line of [`TROUBLES`], and what is wrong with this GPU.
fn troubles_in(line: &str) -> Option<(String, Vec<String>)> {
    let fields: Vec<&str> = line.split(',').map(str::trim).collect();
    let is_yes = |index: usize| {
        fields
            .get(index)
            .is_some_and(|field| field.eq_ignore_ascii_case("yes"))
    };
    let mut troubles = Vec::new();
    if is_yes(1) {
        troubles.push("memory pages will be retired at the next reset".to_owned());
    }
    if is_yes(2) {
        troubles.push("memory rows will be remapped at the next reset".to_owned());
    }
    if is_yes(3) {
        troubles.push("memory rows could not be remapped".to_owned());
    }
    let active = fields.get(4).and_then(|field| field.strip_prefix("0x"));
    let active = active.and_then(|digits| u64::from_str_radix(digits, 16).ok());
    let active = active.unwrap_or(0);
    let reasons = THROTTLES.iter().filter(|(bit, _)| active & bit != 0);
    troubles.extend(reasons.map(|(_, reason)| (*reason).to_owned()));
    Some(((*fields.first()?).to_owned(), troubles))
}

/// The process id and the GPU's UUID in a line of `--query-compute-apps=pid,gpu_uuid`.
fn parse_use(line: &str) -> Option<(u32, String)> {
    let (pid, uuid) = line.split_once(',')?;
    Some((pid.trim().parse().ok()?, uuid.trim().to_owned()))
}

impl Gpu {
    /// Parses a line of [`FIELDS`].
    fn parse(line: &str) -> Option<Self> {
        let fields: Vec<&str> = line.split(',').map(str::trim).collect();
        // A value that the GPU does not have is `[N/A]`.
        let number = |index: usize| fields.get(index)?.parse().ok();
        Some(Self {
            index: fields.first()?.parse().ok()?,
            uuid: (*fields.get(1)?).to_owned(),
            name: printable(fields.get(2)?).into_owned(),
            utilization: number(3),
            celsius: number(4),
            clock_mhz: number(5),
            top_clock_mhz: number(6),
            used_mib: number(7),
            total_mib: number(8),
            memory_errors: number(9),
            troubles: Vec::new(),
        })
    }

    fn fact(&self) -> Fact {
        let mut parts = vec![format!("{} {}", self.index, self.name)];
        parts.extend(self.utilization.map(|share| format!("{share} % busy")));
        if let (Some(used), Some(total)) = (self.used_mib, self.total_mib) {
            let bytes = |mib: u64| bytes(mib.saturating_mul(1 << 20));
            parts.push(format!("{} of {} used", bytes(used), bytes(total)));
        }
        if let (Some(clock), Some(top)) = (self.clock_mhz, self.top_clock_mhz) {
            parts.push(format!("clock {clock} of {top} MHz"));
        }
        parts.extend(self.celsius.map(|celsius| format!("{celsius} °C")));
        let errors = self.memory_errors.unwrap_or(0);
        if errors > 0 {
            parts.push(format!(
                "{} that ECC did not correct",
                count(errors, "memory error")
            ));
        }
        parts.extend(self.troubles.iter().cloned());
        let notable = errors > 0 || !self.troubles.is_empty();
        Fact::new("GPU", parts.join(", "), notable)
    }
}

/// The standard output of a program that ends with 0. It goes to a file, since a pipe would have to be read while the
/// program runs.
fn answer(program: &Path, args: &[&str], deadline: Instant) -> Result<String, Unread> {
    let mut file = tempfile::tempfile().map_err(|_| Unread::Absent)?;
    let output = file.try_clone().map_err(|_| Unread::Absent)?;
    let mut command = Command::new(program);
    command
        .args(args)
        .stdin(Stdio::null())
        .stderr(Stdio::null());
    let child = command.stdout(output).spawn();
    let mut child = child.map_err(|_| Unread::Absent)?;
    if !wait(&mut child, deadline)? {
        return Err(Unread::Absent);
    }
    let mut bytes = Vec::new();
    let read = file
        .seek(SeekFrom::Start(0))
        .and_then(|_| file.take(MOST_BYTES).read_to_end(&mut bytes));
    read.map_err(|_| Unread::Absent)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Waits for the end of a program, and returns whether it ended with 0.
fn wait(child: &mut Child, deadline: Instant) -> Result<bool, Unread> {
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Ok(status.success()),
            Err(_) => return Err(Unread::Absent),
            Ok(None) if Instant::now() >= deadline => {
                // A process that waits in the driver does not end, so its end is not awaited.
                let _ = child.kill();
                return Err(Unread::NoAnswer);
            }
            Ok(None) => std::thread::sleep(POLL_INTERVAL),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    /// A program in place of `nvidia-smi`.
    fn stand_in(folder: &Path, script: &str) -> std::path::PathBuf {
        let path = folder.join("nvidia-smi");
        std::fs::write(&path, format!("#!/bin/sh\n{script}\n"))
            .expect("the directory takes new files");
        let executable = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(&path, executable).expect("the mode of the script can be set");
        path
    }

    /// Tries repeatedly: a program just written may be open for writing in a child that another test forks at that
    /// moment, and then cannot be started yet.
    fn read(program: &Path) -> Gpus {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            match Gpus::read(program, deadline) {
                Ok(gpus) => return gpus,
                Err(_) if Instant::now() < deadline => std::thread::sleep(POLL_INTERVAL),
                Err(error) => panic!("the program gives no answer: {error:?}"),
            }
        }
    }

    #[test]
    fn the_gpu_of_a_process_is_found_by_its_use_or_its_environment() {
        let folder = tempfile::tempdir().expect("a temporary directory can be made");
        let program = stand_in(
            folder.path(),
            "case $1 in\n\
             --query-compute-apps=*) echo '41, GPU-b';;\n\
             *remapped*) echo 'GPU-a, No, No, No, 0x0000000000000001'\n\
             echo 'GPU-b, [N/A], Yes, No, 0x00000000000000A0';;\n\
             *) echo '0, GPU-a, NVIDIA H100 80GB HBM3, 100, 61, 1980, 1980, 40960, 81559, 0'\n\
             echo '1, GPU-b, NVIDIA H100 80GB HBM3, 0, [N/A], 345, 1980, 512, 81559, 2';;\n\
             esac",
        );
        let gpus = read(&program);
        let facts = gpus.of_process(41, b"");
        assert_eq!(facts.len(), 1, "{facts:?}");
        assert_eq!(
            facts[0].text,
            "1 NVIDIA H100 80GB HBM3, 0 % busy, 512 MiB of 79.6 GiB used, clock 345 of 1980 MHz, 2 memory errors \
             that ECC did not correct, memory rows will be remapped at the next reset, slowed down by its \
             temperature, slowed down by its power supply"
        );
        assert!(facts[0].notable);
        let by_environment = |variables: &[u8]| {
            let facts = gpus.of_process(42, variables);
            facts.first().map(|fact| fact.text.starts_with("0 NVIDIA"))
        };
        assert_eq!(by_environment(b"LOCAL_RANK=0\0A=b\0"), Some(true));
        let second = b"CUDA_VISIBLE_DEVICES=1,0\0LOCAL_RANK=1\0";
        assert_eq!(by_environment(second), Some(true));
        let by_uuid = b"CUDA_VISIBLE_DEVICES=GPU-b\0LOCAL_RANK=0\0";
        assert_eq!(by_environment(by_uuid), Some(false));
        assert_eq!(by_environment(b"A=b\0"), None);
        assert_eq!(by_environment(b"LOCAL_RANK=9\0"), None);
    }

    #[test]
    fn a_driver_that_lacks_a_field_still_states_the_rest() {
        let folder = tempfile::tempdir().expect("a temporary directory can be made");
        let program = stand_in(
            folder.path(),
            "case $1 in\n\
             --query-compute-apps=*) echo '41, GPU-a';;\n\
             *remapped*) echo 'Field \"remapped_rows.pending\" is not a valid field to query.'; exit 2;;\n\
             *) echo '0, GPU-a, Tesla P100, 7, 40, 1189, 1328, 10, 16384, 0';;\n\
             esac",
        );
        let facts = read(&program).of_process(41, b"");
        assert_eq!(
            facts[0].text,
            "0 Tesla P100, 7 % busy, 10 MiB of 16 GiB used, clock 1189 of 1328 MHz, 40 °C"
        );
        assert!(!facts[0].notable);
    }

    #[test]
    fn a_program_that_fails_is_distinguished_from_one_that_hangs() {
        let folder = tempfile::tempdir().expect("a temporary directory can be made");
        let absent = folder.path().join("there-is-none");
        let soon = || Instant::now() + Duration::from_millis(300);
        assert_eq!(Gpus::read(&absent, soon()), Err(Unread::Absent));
        let fails = stand_in(folder.path(), "echo 'No devices were found'; exit 6");
        let deadline = Instant::now() + Duration::from_secs(60);
        assert_eq!(Gpus::read(&fails, deadline), Err(Unread::Absent));
        let hangs = stand_in(folder.path(), "exec sleep 3600");
        let deadline = Instant::now() + Duration::from_secs(60);
        while Gpus::read(&hangs, soon()) != Err(Unread::NoAnswer) {
            assert!(Instant::now() < deadline, "it never hung");
        }
    }
}
