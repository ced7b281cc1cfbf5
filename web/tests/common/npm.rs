//! Packages of npm that tests use, installed into the target folder.

use super::skip;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The folder of this name with these packages in its `node_modules`. `None` if npm cannot provide them, with the
/// reason printed, or if the folder cannot be made.
///
/// They are installed in a temporary folder that is then renamed, so that a folder of that name is always complete.
pub fn installed_by_npm(name: &str, packages: &[&str]) -> Option<PathBuf> {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let folder = target.join(name);
    if folder.join("node_modules").is_dir() {
        return Some(folder);
    }
    let fresh = tempfile::tempdir_in(target).ok()?;
    let output = Command::new("npm")
        .args(["install", "--no-audit", "--no-fund", "--prefix"])
        .arg(fresh.path())
        .args(packages)
        .env("PLAYWRIGHT_SKIP_BROWSER_DOWNLOAD", "1")
        .output();
    let why = match output {
        Ok(output) if output.status.success() => {
            let _ = std::fs::remove_dir_all(&folder);
            std::fs::rename(fresh.keep(), &folder).ok()?;
            return Some(folder);
        }
        Ok(output) => String::from_utf8_lossy(&output.stderr).into_owned(),
        Err(error) => error.to_string(),
    };
    skip(&format!("npm cannot install {packages:?}: {}", why.trim()));
    None
}
