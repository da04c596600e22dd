// Package kafkaserver runs throw-away Apache Kafka clusters (KRaft, one or three nodes) from the published jars, for the
// tests and benchmarks that must not take a fake's word.
//
// It needs Java 17 or newer, and Maven to obtain the jars once (pom.xml beside this file pins them).
package kafkaserver
