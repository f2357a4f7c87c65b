//! A wrapper that settles what one answer cannot: whether a 404 that nobody has signed means that the object is gone, and which
//! object an archive class keeps from us.
//!
//! Owns the second question, and the words for the operator. Sits above the counting, so that each question counts. Does not
//! repeat the request.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use super::{
    DeleteOutcome, Described, FolderPage, ListPage, ObjectMeta, PutRequest, RangeSink, RemoteTier,
    StoreError, StoreErrorKind, StoreFuture,
};

/// Asks for proof.
pub struct Proving {
    inner: Arc<dyn RemoteTier>,
}

impl Proving {
    /// Wraps a store.
    pub fn new(inner: Arc<dyn RemoteTier>) -> Self {
        Self { inner }
    }

    async fn settled<T>(&self, key: &str, request: StoreFuture<'_, T>) -> Result<T, StoreError> {
        let error = match request.await {
            Ok(answer) => return Ok(answer),
            Err(error) => error,
        };
        Err(match error.kind() {
            StoreErrorKind::Bare404 => self.looked_for(key, &error).await,
            StoreErrorKind::Archived => {
                let text = format!(
                    "object {key} is in an archive class: restore it from there, and exempt this prefix from the bucket's transitions ({})",
                    error.text()
                );
                StoreError::new(StoreErrorKind::Archived, text)
            }
            _ => error,
        })
    }

    /// Whether the bucket's listing has the key. A listing that fails says nothing.
    async fn looked_for(&self, key: &str, error: &StoreError) -> StoreError {
        let said = error.text();
        let (kind, text) = match self.inner.list(key, None, 1).await {
            Ok(page) if page.objects.first().is_some_and(|object| object.key == key) => (
                StoreErrorKind::Bare404,
                format!("{said}, but the bucket's listing has {key}"),
            ),
            // A page of other keys, or none of many, is no answer to the question.
            Ok(page)
                if page.objects.is_empty() && page.next_token.is_some()
                    || page
                        .objects
                        .iter()
                        .any(|object| !object.key.starts_with(key)) =>
            {
                (
                    StoreErrorKind::Bare404,
                    format!("{said}, and the bucket's listing does not say whether it has {key}"),
                )
            }
            // The key itself would be the first of those that begin with it.
            Ok(_) => (
                StoreErrorKind::NotFound,
                format!("{said}, and the bucket's listing does not have {key} either"),
            ),
            Err(error) => (
                StoreErrorKind::Bare404,
                format!("{said}, and the bucket's listing failed, too: {error}"),
            ),
        };
        StoreError::new(kind, text)
    }
}

impl RemoteTier for Proving {
    fn put(&self, request: PutRequest) -> StoreFuture<'_, ()> {
        self.inner.put(request)
    }

    fn get<'a>(&'a self, key: &'a str, max_bytes: u64) -> StoreFuture<'a, Bytes> {
        Box::pin(self.settled(key, self.inner.get(key, max_bytes)))
    }

    fn get_described<'a>(&'a self, key: &'a str, max_bytes: u64) -> StoreFuture<'a, Described> {
        Box::pin(self.settled(key, self.inner.get_described(key, max_bytes)))
    }

    fn get_range<'a>(&'a self, key: &'a str, range: Range<u64>) -> StoreFuture<'a, Bytes> {
        Box::pin(self.settled(key, self.inner.get_range(key, range)))
    }

    fn stream_range<'a>(
        &'a self,
        key: &'a str,
        range: Range<u64>,
        sink: &'a mut dyn RangeSink,
    ) -> StoreFuture<'a, ()> {
        Box::pin(self.settled(key, self.inner.stream_range(key, range, sink)))
    }

    fn head<'a>(&'a self, key: &'a str) -> StoreFuture<'a, ObjectMeta> {
        Box::pin(self.settled(key, self.inner.head(key)))
    }

    fn list<'a>(
        &'a self,
        prefix: &'a str,
        token: Option<&'a str>,
        max_keys: usize,
    ) -> StoreFuture<'a, ListPage> {
        self.inner.list(prefix, token, max_keys)
    }

    fn list_folders<'a>(
        &'a self,
        prefix: &'a str,
        token: Option<&'a str>,
    ) -> StoreFuture<'a, FolderPage> {
        self.inner.list_folders(prefix, token)
    }

    fn delete<'a>(&'a self, keys: &'a [String]) -> StoreFuture<'a, DeleteOutcome> {
        self.inner.delete(keys)
    }

    fn probe(&self) -> StoreFuture<'_, ()> {
        self.inner.probe()
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Fault, Faulty, MemoryTier, Operation};
    use super::*;

    fn world() -> (Arc<MemoryTier>, Arc<Faulty>, Proving) {
        let memory = Arc::new(MemoryTier::new());
        let faulty = Arc::new(Faulty::new(Arc::clone(&memory) as Arc<dyn RemoteTier>));
        let proving = Proving::new(Arc::clone(&faulty) as Arc<dyn RemoteTier>);
        (memory, faulty, proving)
    }

    fn bare(operation: Operation) -> Fault {
        Fault::fail(operation, StoreErrorKind::Bare404)
    }

    #[tokio::test]
    async fn a_404_that_nobody_has_signed_is_gone_only_if_the_listing_agrees() {
        let (memory, faulty, proving) = world();
        memory.insert("a/key", "bytes");
        // Longer keys under the same beginning are other objects.
        memory.insert("b/key.old", "bytes");
        for (key, kind) in [
            ("a/key", StoreErrorKind::Bare404),
            ("b/key", StoreErrorKind::NotFound),
            ("c/key", StoreErrorKind::NotFound),
        ] {
            faulty.inject(bare(Operation::Get));
            faulty.inject(bare(Operation::GetRange).times(2));
            faulty.inject(bare(Operation::Head));
            let kinds = [
                proving.get(key, 10).await.map(drop).unwrap_err().kind(),
                proving.get_range(key, 0..1).await.unwrap_err().kind(),
                proving
                    .stream_range(key, 0..1, &mut Nowhere)
                    .await
                    .unwrap_err()
                    .kind(),
                proving.head(key).await.map(drop).unwrap_err().kind(),
            ];
            assert_eq!(kinds, [kind; 4], "{key}");
        }
        let listings = faulty.requests();
        let listings = listings
            .iter()
            .filter(|(operation, _)| *operation == Operation::List);
        assert_eq!(listings.count(), 12);
    }

    #[tokio::test]
    async fn a_listing_that_fails_proves_nothing() {
        let (_, faulty, proving) = world();
        for kind in [
            StoreErrorKind::Malformed,
            StoreErrorKind::AccessDenied,
            StoreErrorKind::Bare404,
        ] {
            faulty.inject(bare(Operation::Get));
            faulty.inject(Fault::fail(Operation::List, kind));
            let error = proving.get("a/key", 10).await.unwrap_err();
            assert_eq!(error.kind(), StoreErrorKind::Bare404);
            assert!(error.text().contains(kind.name()), "{error}");
        }
    }

    #[tokio::test]
    async fn a_store_that_signs_is_not_asked_twice() {
        let (_, faulty, proving) = world();
        let error = proving.get("a/key", 10).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::NotFound);
        assert_eq!(faulty.requests().len(), 1);
    }

    #[tokio::test]
    async fn an_archived_object_is_named_with_what_to_do() {
        let (_, faulty, proving) = world();
        faulty.inject(Fault::fail(Operation::GetRange, StoreErrorKind::Archived));
        let error = proving.get_range("a/key", 0..1).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Archived);
        assert!(
            error
                .text()
                .starts_with("object a/key is in an archive class: restore it")
        );
    }

    struct Nowhere;

    impl RangeSink for Nowhere {
        fn push(&mut self, _: Bytes) {}
    }
}
