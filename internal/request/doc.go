// Package request asks a connector to read tables again, beside its stream: walrelay
// snapshot. It looks at configuration, database and Kafka first, so that nothing is
// scheduled which the connector would have to refuse later, and changes nothing but the
// one record that it writes to the checkpoint topic.
package request
