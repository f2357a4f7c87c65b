//! The root that names history which was given up: told once, shown in the status, and named by every root that comes after it.

use std::sync::Arc;

use tiering_core::upload::StoredObject;

use super::Driver;
pub(super) use crate::object_metadata::RootName;
use crate::upload::UploadPush;

impl Driver {
    pub(super) fn abandoned(&mut self, root: StoredObject, first_offset: u64, next_offset: u64) {
        let StoredObject::Root { epoch, uid } = root else {
            return;
        };
        let name = RootName { epoch, uid };
        let key = self.key_of(name);
        self.sink.push(UploadPush::Abandoned {
            root_key: key.as_ref().to_owned(),
            first_offset,
            next_offset,
        });
        self.abandoned = Some((name, key));
    }

    pub(super) fn key_of(&self, RootName { epoch, uid }: RootName) -> Arc<str> {
        let keys = &self.workshop.shared.keys;
        Arc::from(keys.root(&self.workshop.stream.stream_id, epoch, uid))
    }
}
