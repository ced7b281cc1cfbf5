//! `rcomm-fr nccl-plugin`: prints the path of the profiler plug-in for NCCL.

use crate::cli::args::NcclPluginArgs;
use crate::cli::failure::Failure;
use crate::cli::output;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Paths of the plug-in relative to the folder of the program: in a release, in a wheel, in cargo's target folder.
const CANDIDATES: [&str; 3] = [
    "../lib/libnccl-profiler-rcomm.so",
    "libnccl-profiler-rcomm.so",
    "librcomm_nccl_profiler.so",
];

pub(super) fn run(_: &NcclPluginArgs, color: anstream::ColorChoice) -> Result<ExitCode, Failure> {
    let program = std::env::current_exe().map_err(|source| Failure::Read {
        path: PathBuf::from("/proc/self/exe"),
        source,
    })?;
    let folder = program.parent().unwrap_or(Path::new("/"));
    let candidates = CANDIDATES.map(|candidate| folder.join(candidate));
    let found = candidates
        .iter()
        .find_map(|candidate| candidate.canonicalize().ok());
    let Some(path) = found else {
        let candidates: Vec<String> = candidates
            .iter()
            .map(|path| path.display().to_string())
            .collect();
        let sentence = format!(
            "the plug-in for NCCL is not installed next to this program: none of these files exists: {}",
            candidates.join(", ")
        );
        return Err(Failure::Usage { sentence });
    };
    output::write_to(None, color, |out| writeln!(out, "{}", path.display()))?;
    Ok(ExitCode::SUCCESS)
}
