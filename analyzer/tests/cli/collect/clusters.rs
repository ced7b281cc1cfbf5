//! Scripts of `examples/slurm` and `examples/kubernetes`, run as Slurm's daemon runs them, and with a `kubectl` that is
//! a script.

use crate::collect::{DUMPS, read_archive};
use rustix::process::getuid;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The user of the job in the test of the epilog: the account without rights, by its number.
const USER: u32 = 65_534;

fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../examples")
        .join(name)
}

/// The folder of an attempt's dumps, or of a job's rings; removed at the end of a test.
struct Folder(PathBuf);

impl Folder {
    fn of(user: u32, attempt: &str) -> Self {
        Self(format!("/tmp/rcomm-dumps-{user}/{attempt}").into())
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
        let _ = fs::remove_file(&self.0);
        // The folder of the user's others, if this was the last.
        let _ = self.0.parent().map(fs::remove_dir);
    }
}

/// What the prolog prints for a task with these variables.
fn prolog(job: &str, variables: &[(&str, &str)]) -> String {
    let mut command = Command::new("bash");
    command.arg(script("slurm/prolog.sh")).env_clear();
    command.env("PATH", std::env::var_os("PATH").unwrap());
    command.envs([("SLURM_JOB_ID", job), ("SLURM_STEP_ID", "0")]);
    let output = command.envs(variables.iter().copied()).output().unwrap();
    // Slurm starts no task whose prolog fails.
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn the_prolog_changes_no_setting_of_a_task_and_never_fails() {
    let job = format!("prolog{}", std::process::id());
    let folder = Folder::of(getuid().as_raw(), &format!("{job}.0.0"));
    let dumps = folder.0.display();
    let all = prolog(&job, &[]);
    let expected = format!(
        "export RCOMM_RECORD=1\n\
         export RCOMM_JOB={job}.0\n\
         export TORCH_NCCL_DEBUG_INFO_PIPE_FILE={dumps}/pipe-\n\
         export TORCH_FR_DUMP_TEMP_FILE={dumps}/rank_\n\
         export TORCH_NCCL_DEBUG_INFO_TEMP_FILE={dumps}/rank_\n\
         export TORCH_NCCL_TRACE_BUFFER_SIZE=2000\n"
    );
    assert_eq!(all, expected);
    assert!(folder.0.is_dir());
    let own = [
        ("RCOMM_RECORD", "0"),
        ("RCOMM_JOB", "mine"),
        ("TORCH_FR_DUMP_TEMP_FILE", "x"),
    ];
    let others = prolog(&job, &own);
    for (name, _) in own {
        assert!(!others.contains(name), "{others}");
    }
    fs::remove_dir(&folder.0).unwrap();
    fs::write(&folder.0, "the name is taken").unwrap();
    let without_dumps = prolog(&job, &[]);
    assert_eq!(
        without_dumps,
        format!("export RCOMM_RECORD=1\nexport RCOMM_JOB={job}.0\n")
    );
}

#[test]
fn the_epilog_keeps_what_the_user_of_the_job_can_read_and_removes_the_rest() {
    if !getuid().is_root() {
        eprintln!("skipped: Slurm runs the epilog as root, which this is not");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let open =
        |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    open(dir.path(), 0o755);
    let bin = dir.path().join("bin");
    fs::create_dir(&bin).unwrap();
    fs::copy(env!("CARGO_BIN_EXE_rcomm-fr"), bin.join("rcomm-fr")).unwrap();
    let secret = dir.path().join("secret");
    fs::create_dir(&secret).unwrap();
    open(&secret, 0o700);
    let dump = |rank: u32| Path::new(DUMPS).join(format!("never-join-w4/pickle/rank_{rank}"));
    fs::copy(dump(3), secret.join("rank_3")).unwrap();

    let job = format!("epilog{}", std::process::id());
    let kept = Folder::of(USER, &format!("{job}.0.0"));
    let empty = Folder::of(USER, &format!("{job}.1.0"));
    let linked = Folder::of(USER, &format!("{job}.2.0"));
    for folder in [&kept, &empty] {
        fs::create_dir_all(&folder.0).unwrap();
        chown(&folder.0, Some(USER), Some(USER)).unwrap();
    }
    let parent = kept.0.parent().unwrap();
    chown(parent, Some(USER), Some(USER)).unwrap();
    fs::copy(dump(0), kept.0.join("rank_0")).unwrap();
    symlink(&secret, &linked.0).unwrap();
    // The rings of this job under a name of its own, and of another whose name ends alike.
    let rings = |name: String| Folder(format!("/dev/shm/rcomm-{USER}/{name}").into());
    let [named, other] = ["train-", "87b"].map(|before| rings(format!("{before}{job}")));
    for folder in [&named, &other] {
        fs::create_dir_all(&folder.0).unwrap();
        chown(&folder.0, Some(USER), Some(USER)).unwrap();
    }
    chown(named.0.parent().unwrap(), Some(USER), Some(USER)).unwrap();

    let run = |keep: &Path| {
        let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
        let mut epilog = Command::new("bash");
        epilog
            .arg(script("slurm/epilog.sh"))
            .env("PATH", path)
            .env("RCOMM_KEEP", keep);
        epilog.envs([("SLURM_JOB_ID", job.as_str()), ("SLURMD_NODENAME", "n07")]);
        epilog.envs([
            ("SLURM_JOB_UID", USER.to_string()),
            ("SLURM_JOB_GID", USER.to_string()),
        ]);
        let output = epilog.output().unwrap();
        assert!(output.status.success(), "{output:?}");
    };
    let keep = dir.path().join("keep");
    run(&keep);
    let archive = keep.join(&job).join("n07.rcap");
    let (files, manifest) = read_archive(&archive);
    assert_eq!(files.len(), 1, "{manifest}");
    assert_eq!(fs::metadata(&archive).unwrap().uid(), USER);
    assert!(other.0.is_dir());
    for folder in [&kept, &empty, &linked, &named] {
        assert!(
            fs::symlink_metadata(&folder.0).is_err(),
            "{}",
            folder.0.display()
        );
    }
    assert!(secret.join("rank_3").is_file());
    // A job that left nothing but an empty folder has no archive.
    fs::create_dir_all(&empty.0).unwrap();
    chown(&empty.0, Some(USER), Some(USER)).unwrap();
    let keep = dir.path().join("keep nothing");
    run(&keep);
    assert!(!keep.exists());
    assert!(!empty.0.exists());
}

/// Here `kubectl` is a script: of its two pods one gives the records of three ranks, and the other does not answer.
#[test]
fn the_kubernetes_script_names_the_culprit_though_a_pod_fails() {
    let dir = tempfile::tempdir().unwrap();
    let bin = dir.path().join("bin");
    fs::create_dir(&bin).unwrap();
    symlink(env!("CARGO_BIN_EXE_rcomm-fr"), bin.join("rcomm-fr")).unwrap();
    let kubectl = bin.join("kubectl");
    let kubectl_script = "#!/bin/bash\n\
        case \"$*\" in\n\
        'get pods -l job=train -o name') printf 'pod/train-0\\npod/train-1\\n' ;;\n\
        'exec train-0 -c rcomm -- rcomm-fr collect --ask --wait 30s -o -') \
            rcomm-fr collect -o - \"$RECORDS\"/rank_[0-2] ;;\n\
        'exec train-1 -c rcomm -- '*) echo 'pod train-1 is gone' >&2; exit 1 ;;\n\
        esac\n";
    fs::write(&kubectl, kubectl_script).unwrap();
    fs::set_permissions(&kubectl, fs::Permissions::from_mode(0o700)).unwrap();
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    let run = |selector: &str| {
        let mut command = Command::new("bash");
        command.arg(script("kubernetes/hang.sh"));
        command.args([selector, "rcomm"]).current_dir(dir.path());
        let records = Path::new(DUMPS).join("never-join-w4/pickle");
        command.env("PATH", &path).env("RECORDS", records);
        command.output().unwrap()
    };
    let output = run("job=train");
    let printed = String::from_utf8_lossy(&output.stdout);
    let stdout = printed.split_whitespace().collect::<Vec<_>>().join(" ");
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(stdout.starts_with("STUCK rank 1 never issued"), "{stdout}");
    assert!(stdout.contains("host train-1: "), "{stdout}");
    assert!(stdout.contains("3 of 4 ranks"), "{stdout}");
    let no_pod = run("job=other");
    assert_eq!(no_pod.status.code(), Some(2), "{no_pod:?}");
}
