//! States what is left of the rings of a job that is over.

use std::path::Path;

/// A sentence on the rings at these paths that still exist. All rings of a job are in one folder.
pub(super) fn sentence(paths: &[&Path]) -> String {
    let left: Vec<&&Path> = paths.iter().filter(|path| path.exists()).collect();
    let Some(folder) = left.first().and_then(|path| path.parent()) else {
        return "the job's rings were removed at its end; this view keeps what it has read".into();
    };
    let folder = folder.display();
    let (which, them) = match (left.len(), paths.len()) {
        (1, 1) => ("the job's ring is".to_owned(), "it"),
        (left, all) if left == all => ("the job's rings are".to_owned(), "them"),
        (1, all) => (format!("of the job's {all} rings, 1 is"), "it"),
        (left, all) => (format!("of the job's {all} rings, {left} are"), "them"),
    };
    format!("{which} still in {folder}: `rcomm-fr analyze {folder}` reads {them}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rings_that_are_left_are_counted_and_their_folder_is_named() {
        let directory = tempfile::tempdir().expect("a temporary directory can be made");
        let folder = directory.path().join("job");
        let paths = ["0.ring", "1.ring", "2.ring"].map(|name| folder.join(name));
        let paths = paths.each_ref().map(|path| path.as_path());
        let removed = sentence(&paths);
        assert!(removed.contains("were removed at its end"), "{removed}");
        std::fs::create_dir(&folder).expect("the folder can be made");
        let command = format!("`rcomm-fr analyze {}`", folder.display());
        let expected = [
            "of the job's 3 rings, 1 is still in",
            "of the job's 3 rings, 2 are still in",
            "the job's rings are still in",
        ];
        for (path, expected) in paths.iter().zip(expected) {
            std::fs::write(path, "").expect("the file can be written");
            let text = sentence(&paths);
            assert!(text.starts_with(expected), "{text}");
            assert!(text.contains(&command), "{text}");
        }
    }
}
