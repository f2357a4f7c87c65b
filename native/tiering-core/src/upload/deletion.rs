//! The last look before something is deleted: what a manifest names now is not, whatever it was when it became garbage. Keys carry
//! 32 random bits, so a fragment of a lost race and one that was uploaded later may have the same.

use log_format::manifest::Root;

use super::{Effect, StoredObject, UploadMachine};

impl UploadMachine {
    /// Deletes those that nothing names.
    pub(super) fn delete(&mut self, mut objects: Vec<StoredObject>) {
        objects.retain(|object| !self.is_named(object));
        if objects.is_empty() {
            return;
        }
        for object in &objects {
            match object {
                StoredObject::Fragment { .. } => self.counters.fragments_deleted += 1,
                StoredObject::Group { .. } => self.counters.groups_deleted += 1,
                StoredObject::Root { .. } => {}
            }
        }
        self.effects.push_back(Effect::Delete { objects });
    }

    /// Whether what is persisted, what will be, or what is complete and waits for its turn has this very key. What is in groups
    /// that were found when resolving need not be looked into: garbage that they may name has been given up then.
    #[must_use]
    pub fn is_named(&self, object: &StoredObject) -> bool {
        let pending = self.persist.pending();
        match *object {
            StoredObject::Root { epoch, uid } => {
                let is_live = self
                    .pointer
                    .is_some_and(|pointer| (pointer.epoch, pointer.uid) == (epoch, uid));
                let is_next =
                    epoch == self.epoch && pending.is_some_and(|(_, next)| next == Some(uid));
                is_live || is_next || self.persist.replaced == Some(*object)
            }
            StoredObject::Fragment { .. } | StoredObject::Group { .. } => {
                // A group keeps what retention has dropped from its beginning.
                let first_offset = self.persisted.first_offset.min(self.manifest.first_offset);
                let is_in_new_group = self
                    .tree
                    .fresh_objects()
                    .any(|(fresh, end)| fresh == *object && end > first_offset);
                names(&self.persisted, object)
                    || names(&self.manifest, object)
                    || pending.is_some_and(|(root, _)| names(root, object))
                    || self
                        .transfers
                        .done_objects()
                        .any(|(done, _)| done == *object)
                    || is_in_new_group
            }
        }
    }
}

/// Whether the root itself names the object.
fn names(root: &Root, object: &StoredObject) -> bool {
    let first_offset = match *object {
        StoredObject::Fragment { first_offset, .. } | StoredObject::Group { first_offset, .. } => {
            first_offset
        }
        StoredObject::Root { .. } => return false,
    };
    let from = root
        .entries
        .partition_point(|entry| entry.first_offset < first_offset);
    root.entries
        .iter()
        .skip(from)
        .take_while(|entry| entry.first_offset == first_offset)
        .any(|entry| StoredObject::of(entry) == *object)
}
